"""In which order a source's images go into shards.

Many sets are sorted by class. Then a shard holds one class or two, and an epoch, which reads from some shards at a
time, would show the network a few classes at a time. So these are shuffled, once and for all.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..labels import GIVEN
from .source import SourceSplit

Order = Literal["auto", "source", "shuffled"]

_KEY = 0x736F7264657273  # of the one and only shuffle, so that the same input always gives the same shards


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
    """The same samples in a fixed random order; only `random_raw` is used, whose bits numpy keeps for good."""
    order = np.argsort(np.random.Philox(key=_KEY).random_raw(len(split.paths)), kind="stable")
    numbers = order.tolist()
    return replace(
        split,
        paths=[split.paths[number] for number in numbers],
        labels={name: labels[order] for name, labels in split.labels.items()},
        read=lambda place: split.read(numbers[place]),
    )
