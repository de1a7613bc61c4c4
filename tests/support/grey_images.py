"""A split of small grey images for tests that train or evaluate: a learnable pattern per class, plus noise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from sopdist.data.labels import write_labels
from sopdist.data.manifest import Manifest
from sopdist.data.shards import Member
from tests.support.pictures import encoded
from tests.support.small_splits import write_split

CLASSES = tuple("abcdefg")
SIDE = 8  # image size of the recipe `digits`


def pixels_of(index: int) -> NDArray[np.uint8]:
    """Image `index`, whose class is index modulo 7."""
    pattern = np.random.default_rng(index % len(CLASSES)).integers(0, 256, (SIDE, SIDE))
    noise = np.random.default_rng(1000 + index).integers(0, 256, (SIDE, SIDE))
    return ((pattern + noise) // 2).astype(np.uint8)


def write_images(folder: Path, count: int, broken: tuple[int, ...] = ()) -> Manifest:
    """Write `count` images in shards of 20, and label sets `given`, `clean` and `wrong` (every third label shifted)."""
    members = [
        Member(f"k/{index}", "png", encoded(Image.fromarray(pixels_of(index)), "PNG"), {"label": index % len(CLASSES)})
        for index in range(count)
    ]
    for index in broken:
        members[index] = members[index]._replace(image=members[index].image[:40])
    manifest = write_split(folder, members, per_shard=20, classes=CLASSES)
    clean = np.arange(count) % len(CLASSES)
    write_labels(folder, manifest, "clean", clean, {"kind": "test"})
    wrong = np.where(np.arange(count) % 3 == 0, (clean + np.arange(count) // 3) % len(CLASSES), clean)
    write_labels(folder, manifest, "wrong", wrong, {"kind": "test"})
    return manifest
