"""Data of `sopdist bench fashion-mnist`: images, random streams and label noise. Independent of the losses.

The seed decides the subset of the training images and which labels are wrong.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..data.sources.fashion_mnist import read_idx
from ..errors import DataError

DEFAULT_DATA = Path("/usr/share/datasets/fashion-mnist")
CLASSES = 10
SIDE = 28

# Classes that are often confused: shirt and T-shirt, pullover and coat, sandal and sneaker; boot as sneaker.
CONFUSED = {0: 6, 6: 0, 2: 4, 4: 2, 5: 7, 7: 5, 9: 7}


class Split(NamedTuple):
    """Images (N, 28, 28) uint8 and their clean labels (N,) int64, as stored in the files."""

    images: Tensor
    labels: Tensor


def read_split(folder: Path, name: str) -> Split:
    """Read the split "train" or "t10k" of Fashion-MNIST."""
    image_file, label_file = folder / f"{name}-images-idx3-ubyte.gz", folder / f"{name}-labels-idx1-ubyte.gz"
    for path in (image_file, label_file):
        if not path.is_file():
            raise DataError(
                f"{path} is missing. Install Debian's package dataset-fashion-mnist "
                "(apt-get install dataset-fashion-mnist), or name the folder of the four .gz files with --data DIR"
            )
    images = torch.tensor(read_idx(image_file, (SIDE, SIDE)))
    labels = torch.tensor(read_idx(label_file, ())).long()
    if len(images) != len(labels):
        raise DataError(f"{label_file} has {len(labels)} labels for {len(images)} images")
    if len(labels) and labels.max() >= CLASSES:
        raise DataError(f"{label_file} has the label {int(labels.max())}; the classes are 0 to {CLASSES - 1}")
    return Split(images, labels)


def generator(seed: int, purpose: str) -> torch.Generator:
    """An independent random stream for each seed and purpose."""
    state = np.random.SeedSequence([seed, zlib.crc32(purpose.encode())]).generate_state(1)
    return torch.Generator().manual_seed(int(state[0]))


def symmetric(labels: Tensor, draws: torch.Generator, *, rate: float) -> Tensor:
    """Resample each label from all classes with probability `rate`; rate (1 - 1/K) of the labels end up wrong."""
    resampled = torch.rand(len(labels), generator=draws) < rate
    return torch.where(resampled, torch.randint(CLASSES, labels.shape, generator=draws), labels)


def asymmetric(labels: Tensor, draws: torch.Generator, *, rate: float) -> Tensor:
    """Replace each label by the class in CONFUSED with probability `rate`; three classes never change."""
    other = torch.tensor([CONFUSED.get(k, k) for k in range(CLASSES)])
    return torch.where(torch.rand(len(labels), generator=draws) < rate, other[labels], labels)


NOISES: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "sym-40": partial(symmetric, rate=0.4),
    "sym-60": partial(symmetric, rate=0.6),
    "asym-40": partial(asymmetric, rate=0.4),
}


class Images(NamedTuple):
    """Data of one seed: standardised pixels (N, 784) float32 and clean labels (N,) int64."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor


def make_images(train: Split, test: Split, count: int, seed: int) -> Images:
    """A random subset of `count` training images and all test images, standardised by the subset's mean and std."""
    subset = torch.randperm(len(train.labels), generator=generator(seed, "subset"))[:count]
    pixels = train.images[subset].flatten(1).float()  # (count, 784)
    mean, std = pixels.mean(), pixels.std()
    test_pixels = test.images.flatten(1).float()
    return Images((pixels - mean) / std, train.labels[subset], (test_pixels - mean) / std, test.labels)
