"""Streams over small splits of unusual images, and comparison of their batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from sopdist.data.batch import Batch
from sopdist.data.settings import DataSettings
from sopdist.data.shards import Member
from sopdist.data.stream import Stream
from tests.support.pictures import encoded, picture

BACKENDS = ("cpu", "dali")
SAMPLES = 53
BATCH = 12  # divisible by 1, 2, 3 and 4 ranks; 53 samples leave padding in the last batch


def with_orientation(orientation: int) -> dict[str, Any]:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return {"exif": exif}


def pictures() -> list[Member]:
    """Photos of several sizes in every format, some of them unusual."""
    members = []
    for index in range(SAMPLES):
        image = picture(index, *[(80, 60), (60, 80), (64, 64), (200, 150)][index % 4])
        if index == 7:
            image_bytes, extension = encoded(image, **with_orientation(6)), "jpg"
        elif index == 11:
            image_bytes, extension = encoded(image.convert("CMYK")), "jpg"
        elif index == 13:
            image_bytes, extension = encoded(image.convert("P"), "PNG"), "png"
        elif index == 17:
            animated = {"save_all": True, "append_images": [image.rotate(90)]}
            image_bytes, extension = encoded(image, "WEBP", **animated), "webp"
        elif index % 5 == 0:
            image_bytes, extension = encoded(image, "PNG"), "png"
        elif index % 7 == 0:
            image_bytes, extension = encoded(image, "WEBP"), "webp"
        else:
            image_bytes, extension = encoded(image, quality=85), "jpg"
        members.append(Member(f"k/{index}", extension, image_bytes, {"label": index % 3}))
    return members


def open_stream(folder: Path, backend: str = "cpu", recipe: str = "imagenet", **options: Any) -> Stream:
    stream_options = {"rank", "world_size", "train", "views", "seed", "global_batch"}
    data_options = {name: options.pop(name) for name in list(options) if name not in stream_options}
    settings = DataSettings(str(folder), recipe, backend=backend, **{"threads": 2, **data_options})
    return Stream(settings, options.pop("global_batch", BATCH), options.pop("seed", 1), **options)


def by_sample(batches: list[Batch]) -> dict[int, tuple[Tensor, ...]]:
    """Images and label of each sample with weight > 0. No sample may occur twice."""
    found: dict[int, tuple[Tensor, ...]] = {}
    for batch in batches:
        for position in torch.nonzero(batch.weight).flatten().tolist():
            index = int(batch.index[position])
            assert index not in found, f"sample {index} twice"
            images = [view[position] for view in (batch.images, *batch.other_views)]
            found[index] = (*images, batch.labels[position])
    return found


def equal(a: dict[int, tuple[Tensor, ...]], b: dict[int, tuple[Tensor, ...]]) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(x, y) for index in a for x, y in zip(a[index], b[index], strict=True)
    )
