"""The plan: the batches of an epoch, as a pure function of (shard sizes, seed, epoch, global batch).

A plan is an array `batches` of sample indices, (steps, global_batch). Each sample occurs exactly once. Rank r of W
reads the same slice of every batch, and resuming at step t starts at batch t. Exactly-once epochs, a change of world
size and a resume in the middle of an epoch therefore need no replay and no bookkeeping. This module needs only NumPy.

A full shuffle would read from all shards at once. The plan reads from a few shards at a time:

    1. The shards, in random order, are concatenated and cut into L *lanes* of equal length (fewer than L if there are
       not at least `block` shards per lane).
    2. Each lane is shuffled within a sliding block of shards: a sample of the lane's s-th shard (of S) gets the key
       s + block * u modulo S, with u uniform in [0, 1), and the lane is sorted by key. At most `block` shards of a lane
       are in use at any time, and with block >= S the shuffle is a full one. (Thanks to modulo S the ends of a lane are
       mixed as well as its middle; in return, the last block - 1 shards are visited twice.)
    3. A batch takes samples from all lanes in turn, and its columns are sorted by lane. Since each rank owns a range of
       columns, it also owns the lanes in them.

Example: two shards of four samples, two lanes, block 1, global batch 4, two ranks:

    lanes   [5 4 7 6], [0 3 1 2]     batches   [5 4 0 3]     rank 0 reads 5 4, then 7 6: shard 1 only
                                               [7 6 1 2]     rank 1 reads 0 3, then 1 2: shard 0 only

If the samples do not fill the last batch, the rest is padded with `NO_SAMPLE`. The padding is spread evenly over the
columns, so that every rank gets its share of samples.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError

VERSION = 1  # part of a checkpoint's fingerprint: increased whenever the same arguments give a different plan
NO_SAMPLE = -1
LANES = 32
BLOCK = 8

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Plan:
    """The batches of an epoch."""

    batches: NDArray[np.integer]  # (steps, global_batch)
    part_of_column: NDArray[np.int64] | None = None  # (global_batch,) if batches have several parts, see parts.py

    @property
    def steps(self) -> int:
        """Number of batches, and of optimizer steps, of the epoch."""
        return len(self.batches)

    def part(self, step: int, rank: int, world_size: int) -> Indices:
        """The indices that `rank` reads at `step`, including padding."""
        return self.batches[step, rank_columns(self.batches.shape[1], rank, world_size)].astype(np.int64)


def rank_columns(global_batch: int, rank: int, world_size: int) -> slice:
    """The columns of a batch that belong to a rank: contiguous, of widths that differ by at most one."""
    if not 0 <= rank < world_size <= global_batch:
        raise DataError(
            f"rank {rank} of {world_size} with a global batch of {global_batch}: some rank would get no sample"
        )
    return slice(rank * global_batch // world_size, (rank + 1) * global_batch // world_size)


def without_padding(batch: NDArray[np.integer]) -> Indices:
    """Replace padding by repeating samples of the same batch, so that every rank gets a full batch of real images.

    The caller gives the repeated samples weight 0.
    """
    real = batch[batch != NO_SAMPLE]
    return np.where(batch == NO_SAMPLE, np.resize(real, len(batch)), batch).astype(np.int64)


def parts_of_ranks(batch: NDArray[np.integer], world_size: int) -> list[Indices]:
    """The samples that each rank reads of a global batch, with padding replaced as in `without_padding`."""
    samples = without_padding(batch)
    return [samples[rank_columns(len(batch), rank, world_size)] for rank in range(world_size)]


def training_plan(
    firsts: Indices,
    seed: int,
    epoch: int,
    global_batch: int,
    *,
    subset: Indices | None = None,
    lanes: int = LANES,
    block: int = BLOCK,
    stream: int = 0,
) -> Plan:
    """Plan an epoch over all samples, or over `subset` (ascending, without duplicates).

    `stream` selects the random numbers: an epoch that passes over samples more than once takes a new one each time.
    `firsts`, (shards + 1,), holds the index of each shard's first sample, followed by N (`Manifest.firsts`).
    """
    _check(global_batch, lanes, block)
    words = _random_words(seed, epoch, stream)
    counts = np.diff(firsts) if subset is None else np.diff(np.searchsorted(subset, firsts))
    starts = np.concatenate(([0], np.cumsum(counts)))  # of each shard, among the samples to plan
    samples = int(starts[-1])
    if samples == 0:
        raise DataError("cannot plan an epoch: there are no samples")

    # 1. Concatenate the shards in random order. A sample is represented by its position in `subset`.
    order = np.argsort(words.random_raw(len(counts)), kind="stable")
    order = order[counts[order] > 0]
    ends = np.cumsum(counts[order])
    shifts = starts[order] + counts[order] - ends  # from a position in the concatenation to the sample there

    # 2. Shuffle each lane and store it as a column. The lengths of lanes differ by at most one sample.
    lanes = _usable_lanes(len(order), lanes, block)
    columns = np.full((-(-samples // lanes), lanes), NO_SAMPLE, dtype=_dtype(samples))  # (longest lane, lanes)
    cuts = np.arange(lanes + 1) * samples // lanes
    for lane, (start, stop) in enumerate(itertools.pairwise(cuts)):
        first, last = np.searchsorted(ends, (start, stop - 1), side="right")
        inside = slice(first, last + 1)  # the lane's shards
        taken = np.diff(np.minimum(ends[inside], stop), prepend=start)  # samples of each of them in the lane
        lane_samples = np.arange(start, stop) + np.repeat(shifts[inside], taken)
        columns[: stop - start, lane] = lane_samples[_lane_order(taken, block, words)]

    # 3. Take samples from all lanes in turn.
    sequence = columns[columns != NO_SAMPLE] if samples % lanes else columns.reshape(-1)  # (samples,)
    batches = _cut(sequence if subset is None else subset[sequence].astype(_dtype(firsts[-1])), global_batch)
    _sort_columns_by_lane(batches, lanes)
    return Plan(_spread_last(batches))


def shards_in_use(shards: int, global_batch: int, columns: slice, lanes: int = LANES, block: int = BLOCK) -> int:
    """How many shards a rank that owns `columns` reads from at a time: one block per lane, and one more block."""
    lanes = _usable_lanes(shards, lanes, block)
    in_columns: set[int] = set()
    for step in range(lanes // math.gcd(lanes, global_batch)):
        in_columns.update(np.sort((step * global_batch + np.arange(global_batch)) % lanes)[columns].tolist())
    return (len(in_columns) + 1) * block


def evaluation_plan(samples: int, global_batch: int, subset: Indices | None = None) -> Plan:
    """Every sample, or every one of `subset`, once, in index order, for any number of ranks."""
    _check(global_batch, 1, 1)
    chosen = np.arange(samples, dtype=_dtype(samples)) if subset is None else subset.astype(_dtype(samples))
    return Plan(_spread_last(_cut(chosen, global_batch)))


def balanced_subset(labels: NDArray[np.int32], classes: int, count: int, seed: int, epoch: int) -> Indices:
    """Draw about `count` samples for the epoch, in ascending order.

    Each class contributes the same number of samples, or all of them if it has fewer.
    """
    if count < classes:
        raise DataError(f"data.balanced_per_epoch = {count}: fewer than one sample for each of {classes} classes")
    draw = _random_words(seed, epoch, stream=1).random_raw(len(labels))
    order = np.lexsort((draw, labels))  # by class, in random order within a class
    order = order[np.searchsorted(labels[order], 0) :]  # without unknown labels
    sizes = np.bincount(labels[order], minlength=classes)
    rank_in_class = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return np.sort(order[rank_in_class < count // classes])


def _usable_lanes(shards: int, lanes: int, block: int) -> int:
    """The number of lanes, reduced so that each has at least a block of shards: shorter ones would hardly mix."""
    return max(1, min(lanes, shards // block))


def _lane_order(counts: Indices, block: int, words: np.random.Philox) -> Indices:
    """The order in which a lane reads its samples, given how many samples it has from each of its shards."""
    shards, samples = len(counts), int(counts.sum())
    shard = np.repeat(np.arange(float(shards)), counts)
    uniform = (words.random_raw(samples) >> np.uint64(11)) * 2.0**-53
    key = shard + min(block, shards) * uniform
    key[key >= shards] -= shards
    # Pack the key, as an integer, above the bits of the position. One sort of plain integers, several times faster than
    # an argsort, then orders the keys and breaks ties. Each operation rounds once, so all machines get the same order.
    bits = max(1, (samples - 1).bit_length())
    packed = (key * (2.0 ** (62 - bits) / shards)).astype(np.int64) << bits | np.arange(samples)
    packed.sort()
    return packed & ((1 << bits) - 1)


def _sort_columns_by_lane(batches: NDArray[np.integer], lanes: int) -> None:
    """In place. The lane at step t, column c is (t * width + c) mod lanes, so only a few different orders occur."""
    width = batches.shape[1]
    period = lanes // math.gcd(lanes, width)
    for first in range(min(period, len(batches))):
        order = np.argsort((first * width + np.arange(width)) % lanes, kind="stable")
        batches[first::period] = batches[first::period, order]


def _dtype(samples: int) -> type[np.integer]:
    """The smaller type where it suffices: planning is bound by memory bandwidth."""
    return np.int32 if samples < 2**31 else np.int64


def _cut(values: NDArray[np.integer], global_batch: int) -> NDArray[np.integer]:
    """Cut into batches, (steps, global_batch), and pad the end of the last one."""
    batches = np.full((-(-len(values) // global_batch), global_batch), NO_SAMPLE, values.dtype)
    batches.reshape(-1)[: len(values)] = values
    return batches


def _spread_last(batches: NDArray[np.integer]) -> NDArray[np.integer]:
    """Distribute the last batch's samples over its columns, in place, so that every slice of columns has its share."""
    for last in batches[-1:]:
        samples = last[last != NO_SAMPLE]
        last[:] = NO_SAMPLE
        last[np.arange(len(samples)) * len(last) // len(samples)] = samples
    return batches


def _random_words(seed: int, epoch: int, stream: int) -> np.random.Philox:
    """A separate generator for each (seed, epoch, stream). Use only `random_raw`, whose bits NumPy guarantees."""
    if seed < 0 or epoch < 0:
        raise DataError(f"seed {seed}, epoch {epoch}: must not be negative")
    return np.random.Philox(key=seed, counter=[0, 0, epoch, stream])


def _check(global_batch: int, lanes: int, block: int) -> None:
    for name, value in (("global batch", global_batch), ("data.lanes", lanes), ("data.block", block)):
        if value < 1:
            raise DataError(f"{name} = {value}: must be at least 1")
