"""In which order a source's images go into shards, and which of them are held out for validation.

Many sets are sorted by class. Then a shard holds one class or two, and an epoch, which reads from some shards at a
time, would show the network a few classes at a time. So these are shuffled, once and for all.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..labels import GIVEN
from .source import SourceSplit

Order = Literal["auto", "source", "shuffled"]

TRAIN, VAL = "train", "val"
_KEY = 0x736F7264657273  # of the one and only shuffle, so that the same input always gives the same shards
_KEY_OF_VAL = 0x68656C646F7574  # another one, so that what is held out says nothing of the order


def arrange(split: SourceSplit, order: Order, samples_per_shard: int) -> tuple[SourceSplit, Order]:
    """The split in the order asked for, and which that is: `auto` shuffles what is sorted by class."""
    if order == "auto":
        several_shards = len(split.paths) > samples_per_shard
        order = "shuffled" if several_shards and is_sorted_by_class(split.labels[GIVEN]) else "source"
    return (shuffle(split) if order == "shuffled" else split), order


def is_sorted_by_class(labels: NDArray[np.int64]) -> bool:
    """Do neighbours share their class far more often than by chance?"""
    if len(labels) < 2:
        return False
    shares = np.unique(labels, return_counts=True)[1] / len(labels)
    by_chance = float((shares**2).sum())
    return bool((labels[1:] == labels[:-1]).mean() > (1 + by_chance) / 2)


def shuffle(split: SourceSplit) -> SourceSplit:
    """The same samples in a fixed random order."""
    return _take(split, np.argsort(_random(_KEY, len(split.paths)), kind="stable"))


def hold_out(split: SourceSplit, share: float) -> tuple[SourceSplit, SourceSplit]:
    """Training images, and a split `val` of about `share` of each class; the same ones whenever the source is the same.

    A class keeps at least one image for training. With 0.1 a class of 4 images gives none, one of 5 to 14 gives one.
    """
    given = split.labels[GIVEN]
    order = np.lexsort((_random(_KEY_OF_VAL, len(given)), given))  # (N,) by class, at random inside of each
    counts = np.unique(given, return_counts=True)[1]  # (classes,)
    held = np.minimum((share * counts + 0.5).astype(np.int64), counts - 1)  # (classes,)
    rank = np.arange(len(given)) - np.repeat(np.cumsum(counts) - counts, counts)  # (N,) inside of its class
    is_val = np.empty(len(given), dtype=bool)
    is_val[order] = rank < np.repeat(held, counts)
    if not is_val.any():
        raise DataError(f"--val {share:g}: no class has enough images to hold one out")
    train, val = (replace(_take(split, np.flatnonzero(chosen)), held_out=share) for chosen in (~is_val, is_val))
    return train, replace(val, name=VAL)


def _random(key: int, count: int) -> NDArray[np.uint64]:
    """Only `random_raw` is used, whose bits numpy keeps for good."""
    return np.random.Philox(key=key).random_raw(count)


def _take(split: SourceSplit, numbers: NDArray[np.intp]) -> SourceSplit:
    """The samples of these numbers, in this order, with all that belongs to them."""
    places = numbers.tolist()
    return replace(
        split,
        paths=[split.paths[place] for place in places],
        labels={name: labels[numbers] for name, labels in split.labels.items()},
        read=lambda place: split.read(places[place]),
    )
