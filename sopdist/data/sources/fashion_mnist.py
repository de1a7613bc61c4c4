"""Fashion-MNIST: grey images of clothes, 28 x 28 pixels, 60,000 for training and 10,000 for testing. 10 classes.

Expected layout: in --root, or in --root/FashionMNIST/raw/ (as torchvision stores them), compressed (.gz) or not:

  train-images-idx3-ubyte.gz    train-labels-idx1-ubyte.gz
  t10k-images-idx3-ubyte.gz     t10k-labels-idx1-ubyte.gz

Without --root, the files of Debian's package dataset-fashion-mnist are used.

Splits: train and test. Label sets: given and clean, which are identical.
"""

from __future__ import annotations

import argparse
import gzip
import zlib
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from ..labels import CLEAN, GIVEN
from .digits import read_grey
from .lists import find_files, read_bytes, root_of
from .source import SourceSplit, select_splits

CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
_DATASET = "fashion-mnist"
_DEBIAN = Path("/usr/share/datasets/fashion-mnist")
_FOLDERS = ("", "FashionMNIST/raw", "raw")
_SIDE = 28
_SPLITS = {"train": "train", "test": "t10k"}
_IMAGES, _LABELS = "images-idx3-ubyte", "labels-idx1-ubyte"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No options of its own."""


def find_splits(args: argparse.Namespace) -> list[SourceSplit]:
    """train and test."""
    root = _DEBIAN if args.root is None else root_of(args)
    wanted = select_splits(tuple(_SPLITS), args.splits)
    names = [f"{_SPLITS[name]}-{kind}" for name in wanted for kind in (_IMAGES, _LABELS)]
    try:
        files = find_files(names, [root / folder for folder in _FOLDERS], suffixes=("", ".gz"))
    except DataError as error:
        if args.root is not None:
            raise
        raise DataError(
            f"{error}; set --root to their folder, or install Debian's package dataset-fashion-mnist"
        ) from None
    splits = []
    for name in wanted:
        images_path, labels_path = (files[f"{_SPLITS[name]}-{kind}"] for kind in (_IMAGES, _LABELS))
        pixels, labels = read_idx(images_path, (_SIDE, _SIDE)), read_idx(labels_path, ())
        if len(pixels) != len(labels):
            raise DataError(f"{images_path} has {len(pixels):,} images, {labels_path} has {len(labels):,} labels")
        if len(labels) and labels.max() >= len(CLASSES):
            raise DataError(f"{labels_path}: label {labels.max()}; must be from 0 to {len(CLASSES) - 1}")
        origin = {"source": _DATASET, "file": labels_path.name}
        splits.append(
            SourceSplit(
                dataset=_DATASET,
                name=name,
                classes=CLASSES,
                paths=[f"{i:05d}.png" for i in range(len(pixels))],
                labels=dict.fromkeys((GIVEN, CLEAN), labels.astype(np.int64)),
                read=partial(read_grey, pixels),
                origins=dict.fromkeys((GIVEN, CLEAN), origin),
            )
        )
    return splits


def read_idx(path: Path, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Read an idx file whose items have `shape`, and check its exact size; returns (N, *shape).

    Header: 0, 0, 8 (for uint8), the number of dimensions; then the size of each dimension in four bytes.
    """
    content = _content(path)
    dimensions = 1 + len(shape)
    if content[:4] != bytes((0, 0, 8, dimensions)):
        raise DataError(f"{path}: not an idx file of {dimensions} dimensions (starts with {content[:4].hex(' ')})")
    header = 4 + 4 * dimensions
    if len(content) < header:
        raise DataError(f"{path}: truncated header; copy the file again")
    count, *item = (int(size) for size in np.frombuffer(content, ">u4", dimensions, offset=4))
    if tuple(item) != shape:
        raise DataError(
            f"{path}: images of {' x '.join(map(str, item))} pixels, expected {' x '.join(map(str, shape))}"
        )
    expected = header + count * int(np.prod(shape, dtype=np.int64))
    if len(content) != expected:
        what = "truncated" if len(content) < expected else "too long"
        raise DataError(
            f"{path}: {what}: {len(content):,} bytes, expected {expected:,} for {count:,} items; copy it again"
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(count, *shape)


def _content(path: Path) -> bytes:
    content = read_bytes(path)
    try:
        return gzip.decompress(content) if path.suffix == ".gz" else content
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: damaged or truncated ({error}); copy it again") from None
