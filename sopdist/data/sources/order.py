"""The order in which the images of a source go into shards, and the validation images that are held out.

Many data sets are sorted by class. A shard would then hold only one or two classes, and an epoch, which reads from a
few shards at a time, would show the network only a few classes at a time. Such data sets are shuffled once, here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from ..labels import GIVEN
from .source import SourceSplit

Order = Literal["auto", "source", "shuffled"]

TRAIN, VAL = "train", "val"
_KEY = 0x736F7264657273  # Philox key of the shuffle; fixed, so that the same input always gives the same shards
_VAL_KEY = 0x68656C646F7574  # another key, so that the validation images are independent of the order


def arrange(split: SourceSplit, order: Order, samples_per_shard: int) -> tuple[SourceSplit, Order]:
    """Apply `order` to the split; also returns the order used: `auto` shuffles a split that is sorted by class."""
    if order == "auto":
        several_shards = len(split.paths) > samples_per_shard
        order = "shuffled" if several_shards and is_sorted_by_class(split.labels[GIVEN]) else "source"
    return (shuffle(split) if order == "shuffled" else split), order


def is_sorted_by_class(labels: NDArray[np.int64]) -> bool:
    """Whether neighbours have the same class far more often than by chance."""
    if len(labels) < 2:
        return False
    frequencies = np.unique(labels, return_counts=True)[1] / len(labels)
    by_chance = float((frequencies**2).sum())
    return bool((labels[1:] == labels[:-1]).mean() > (1 + by_chance) / 2)


def shuffle(split: SourceSplit) -> SourceSplit:
    """The same samples in a fixed random order."""
    return _take(split, np.argsort(_random(_KEY, len(split.paths)), kind="stable"))


def hold_out(split: SourceSplit, fraction: float) -> tuple[SourceSplit, SourceSplit]:
    """Split off about `fraction` of each class as `val`; the same source always gives the same images.

    Each class keeps at least one image for training. With 0.1, a class of 4 images gives none, a class of 5 to 14
    images gives one.
    """
    given = split.labels[GIVEN]
    order = np.lexsort((_random(_VAL_KEY, len(given)), given))  # (N,) by class, in random order within each
    counts = np.unique(given, return_counts=True)[1]  # (classes,)
    held = np.minimum((fraction * counts + 0.5).astype(np.int64), counts - 1)  # (classes,)
    rank = np.arange(len(given)) - np.repeat(np.cumsum(counts) - counts, counts)  # (N,) within its class
    is_val = np.empty(len(given), dtype=bool)
    is_val[order] = rank < np.repeat(held, counts)
    if not is_val.any():
        raise DataError(f"--val {fraction:g}: no class has enough images to hold one out")
    train, val = (replace(_take(split, np.flatnonzero(chosen)), held_out=fraction) for chosen in (~is_val, is_val))
    return train, replace(val, name=VAL)


def _random(key: int, count: int) -> NDArray[np.uint64]:
    """Random words. NumPy guarantees that `random_raw` gives the same bits in every version."""
    return np.random.Philox(key=key).random_raw(count)


def _take(split: SourceSplit, positions: NDArray[np.intp]) -> SourceSplit:
    """The samples at these positions, in this order."""
    chosen = positions.tolist()
    return replace(
        split,
        paths=[split.paths[i] for i in chosen],
        labels={name: labels[positions] for name, labels in split.labels.items()},
        read=lambda i: split.read(chosen[i]),
    )
