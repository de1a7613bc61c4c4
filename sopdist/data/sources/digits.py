"""Handwritten digits: load_digits of scikit-learn, 1,797 grey images of 8 x 8 pixels. 10 classes.

The images are part of scikit-learn, so there is nothing to download and no --root.

Splits: train and test, 80:20; every fifth image of each class goes to test. Label sets: given and clean, which are
identical.
"""

from __future__ import annotations

import argparse
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from ..labels import CLEAN, GIVEN
from .source import SourceSplit

_DATASET = "digits"
_BRIGHTEST = 16
_EVERY = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No options of its own."""


def find_splits(args: argparse.Namespace) -> list[SourceSplit]:
    """train and test."""
    if args.root is not None:
        raise DataError(f"--root {args.root}: the digits are part of scikit-learn; leave --root out")
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DataError("`sopdist prepare digits` needs scikit-learn: pip install scikit-learn") from None
    values, labels = load_digits(return_X_y=True)
    pixels = np.rint(values.reshape(-1, 8, 8) * 255 / _BRIGHTEST).astype(np.uint8)  # (N, 8, 8)
    labels = labels.astype(np.int64)
    is_test = _every_fifth_of_its_class(labels)
    origin = {"source": _DATASET}
    splits = []
    for name, chosen in (("train", np.flatnonzero(~is_test)), ("test", np.flatnonzero(is_test))):
        splits.append(
            SourceSplit(
                dataset=_DATASET,
                name=name,
                classes=tuple("0123456789"),
                paths=[f"{i:04d}.png" for i in chosen],  # position in load_digits
                labels=dict.fromkeys((GIVEN, CLEAN), labels[chosen]),
                read=partial(read_grey, pixels[chosen]),
                origins=dict.fromkeys((GIVEN, CLEAN), origin),
            )
        )
    return splits


def read_grey(pixels: NDArray[np.uint8], i: int) -> bytes:
    """Image `i` of `pixels`, (N, height, width), as PNG."""
    from PIL import Image

    from ..prepare.reencode import encode_png

    return encode_png(Image.fromarray(pixels[i]))


def _every_fifth_of_its_class(labels: NDArray[np.int64]) -> NDArray[np.bool_]:
    chosen = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        chosen[np.flatnonzero(labels == label)[_EVERY // 2 :: _EVERY]] = True
    return chosen
