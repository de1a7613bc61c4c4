"""Candidates of `sopdist bench input`: both backends of sopdist, two stock pipelines, and decoding alone.

Each one yields batches endlessly, with one thread or process per core.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from ..data.augment.draws import uniforms
from ..data.augment.recipes import Recipe, find_recipe
from ..data.decode.images import decode_image
from ..data.decode.pixels import crop
from ..data.headers import read_header
from ..data.manifest import index_name
from ..data.settings import Backend, DataSettings
from ..data.stream import Stream

Batches = Iterator[Any]

OURS_CPU, OURS_DALI = "sopdist, cpu", "sopdist, dali"
DALI_READER, WEBDATASET = "DALI readers.webdataset", "webdataset + PIL + DataLoader"
RAW_CPU, RAW_DALI = "decode + resize only, simplejpeg", "decode + resize only, DALI"


class Setting(NamedTuple):
    """Settings that all candidates share."""

    folder: Path
    recipe_name: str
    batch: int
    cores: int
    jpegs: list[bytes]  # for the candidates that do not read shards

    @property
    def recipe(self) -> Recipe:
        """Recipe for crops and normalisation."""
        return find_recipe(self.recipe_name)

    @property
    def tars(self) -> list[str]:
        """Paths of the shards."""
        return sorted(str(path) for path in self.folder.glob("*.tar"))


def ours(setting: Setting, backend: Backend) -> Batches:
    """Batches of `Stream`."""
    settings = DataSettings(str(setting.folder), setting.recipe_name, backend=backend, threads=setting.cores)
    with Stream(settings, setting.batch) as stream:
        for epoch in itertools.count():
            yield from (batch.images for batch in stream.epoch(epoch))


def dali_reader(setting: Setting) -> Batches:
    """DALI's own reader on the same shards and index files, as in its documentation."""
    from nvidia.dali import fn, pipeline_def, types

    recipe = setting.recipe

    @pipeline_def(batch_size=setting.batch, num_threads=setting.cores, device_id=None, prefetch_queue_depth=2)
    def graph() -> Any:
        members: Any = fn.readers.webdataset(
            paths=setting.tars,
            index_paths=[str(Path(tar).with_name(index_name(Path(tar).name))) for tar in setting.tars],
            ext=["jpg", "json"],
            random_shuffle=True,
            missing_component_behavior="error",
        )
        images = fn.decoders.image_random_crop(
            members[0], device="cpu", random_area=list(recipe.area), random_aspect_ratio=list(recipe.aspect)
        )
        images = fn.resize(images, size=(recipe.size, recipe.size), interp_type=types.INTERP_LINEAR, antialias=True)
        return fn.crop_mirror_normalize(
            images, mirror=fn.random.coin_flip(), dtype=types.FLOAT, output_layout="HWC",
            mean=[255 * mean for mean in recipe.mean], std=[255 * std for std in recipe.std],
        )  # fmt: skip

    return _run_dali(graph())


def _run_dali(pipeline: Any) -> Batches:
    """Batches as torch tensors that the caller may keep, as with `ours`."""
    pipeline.build()
    while True:
        (output,) = pipeline.run()
        yield torch.from_numpy(np.array(output.as_tensor()))


def stock_webdataset(setting: Setting) -> Batches:
    """The pipeline of webdataset's documentation: PIL images, torchvision-style transforms, worker processes."""
    import webdataset as wds

    dataset = (
        wds.WebDataset(setting.tars, shardshuffle=len(setting.tars), resampled=False, empty_check=False)
        .shuffle(500)
        .decode("pil")
        .to_tuple("jpg", "json")
        .map_tuple(_PilTransform(setting.recipe), lambda record: record["label"])
        .batched(setting.batch, partial=False)
        .repeat()
    )
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=setting.cores)
    return (images for images, _ in loader)


class _PilTransform:
    """Random resized crop, flip, conversion to a tensor, normalisation."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.mean, self.std = (torch.tensor(values).view(3, 1, 1) for values in (recipe.mean, recipe.std))

    def __call__(self, image: Image.Image) -> torch.Tensor:
        width, height = (np.array([side]) for side in image.size)
        boxes, mirror = self.recipe.training_boxes(width, height, np.array([[random.random() for _ in range(23)]]))
        x, y, width, height = boxes[0].tolist()
        size = (self.recipe.size, self.recipe.size)
        image = image.crop((x, y, x + width, y + height)).resize(size, Image.Resampling.BILINEAR)
        if mirror[0]:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
        return pixels.to(torch.float32).div(255).sub(self.mean).div(self.std)


def _boxes(setting: Setting) -> tuple[np.ndarray, np.ndarray]:
    headers = [read_header(jpeg) for jpeg in setting.jpegs]
    width, height = (np.array([getattr(header, side) for header in headers]) for side in ("width", "height"))
    return setting.recipe.training_boxes(width, height, uniforms(0, 0, np.arange(len(headers)), 0))


def raw_cpu(setting: Setting) -> Batches:
    """Only the decoding and resizing of the cpu backend, from files in memory."""
    side = setting.recipe.size
    headers = [read_header(jpeg) for jpeg in setting.jpegs]
    boxes, mirror = _boxes(setting)

    def work(i: int) -> None:
        i %= len(headers)
        out = np.empty((side, side, 3), np.uint8)
        crop(decode_image(setting.jpegs[i], headers[i]), boxes[i], bool(mirror[i]), out)

    with ThreadPoolExecutor(setting.cores) as pool:
        pending = [pool.submit(work, i) for i in range(2 * setting.batch)]
        for i in itertools.count(2 * setting.batch):
            pending.append(pool.submit(work, i))
            if i % setting.batch == 0:
                for future in pending[: setting.batch]:
                    future.result()
                del pending[: setting.batch]
                yield None


def raw_dali(setting: Setting) -> Batches:
    """Only DALI's decoding and resizing, from files in memory, with the same crops as `raw_cpu`."""
    from nvidia.dali import fn, pipeline_def, types

    side, count = setting.recipe.size, len(setting.jpegs)
    jpegs = [np.frombuffer(jpeg, np.uint8) for jpeg in setting.jpegs]
    boxes, _ = _boxes(setting)

    def batches() -> Iterator[tuple[list[np.ndarray], np.ndarray, np.ndarray]]:
        for start in itertools.count(0, setting.batch):
            positions = np.arange(start, start + setting.batch) % count
            yield [jpegs[i] for i in positions], boxes[positions, :2], boxes[positions, 2:]

    @pipeline_def(batch_size=setting.batch, num_threads=setting.cores, device_id=None, prefetch_queue_depth=2)
    def graph() -> Any:
        encoded, anchor, shape = fn.external_source(batches(), num_outputs=3)
        part = fn.decoders.image_slice(
            encoded, anchor, shape, axis_names="WH", normalized_anchor=False, normalized_shape=False, device="cpu"
        )
        return fn.resize(part, size=(side, side), interp_type=types.INTERP_LINEAR, antialias=True)

    pipeline = graph()
    pipeline.build()
    while True:
        yield pipeline.run()


CANDIDATES: dict[str, Callable[[Setting], Batches]] = {
    OURS_CPU: lambda setting: ours(setting, "cpu"),
    OURS_DALI: lambda setting: ours(setting, "dali"),
    DALI_READER: dali_reader,
    WEBDATASET: stock_webdataset,
    RAW_CPU: raw_cpu,
    RAW_DALI: raw_dali,
}
