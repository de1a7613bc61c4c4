"""A split of small grey images for tests that train or evaluate: a learnable pattern for each class, and noise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from sopdist.data.labels import write_labels
from sopdist.data.manifest import Manifest
from sopdist.data.shards import Member
from tests.data.pictures import encoded
from tests.data.small_splits import write_split

CLASSES = tuple("abcdefg")
SIDE = 8  # what the recipe digits shows


def pixels_of(index: int) -> NDArray[np.uint8]:
    """Image `index`, whose class is index modulo 7."""
    pattern = np.random.default_rng(index % len(CLASSES)).integers(0, 256, (SIDE, SIDE))
    noise = np.random.default_rng(1000 + index).integers(0, 256, (SIDE, SIDE))
    return ((pattern + noise) // 2).astype(np.uint8)


def write_images(folder: Path, count: int, broken: tuple[int, ...] = ()) -> Manifest:
    """So many images in shards of 20, with the label sets `given`, `clean` and `wrong` (every third class is wrong)."""
    members = [
        Member(f"k/{index}", "png", encoded(Image.fromarray(pixels_of(index)), "PNG"), {"label": index % len(CLASSES)})
        for index in range(count)
    ]
    for index in broken:
        members[index] = members[index]._replace(image=members[index].image[:40])
    manifest = write_split(folder, members, per_shard=20, classes=CLASSES)
    truth = np.arange(count) % len(CLASSES)
    write_labels(folder, manifest, "clean", truth, {"kind": "test"})
    wrong = np.where(np.arange(count) % 3 == 0, (truth + np.arange(count) // 3) % len(CLASSES), truth)
    write_labels(folder, manifest, "wrong", wrong, {"kind": "test"})
    return manifest
