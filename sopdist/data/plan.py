"""The plan: who sees what, when, as a pure function of (shard sizes, seed, epoch, global batch). Only numpy, no state.

A plan is `rows`, (steps, global_batch) sample indices. Each sample stands in it exactly once. Rank r of W takes the
same slice of every row, and a resume starts at row t; so exactly-once epochs, a change of the number of ranks and a
resume in the middle of an epoch need no replay and no bookkeeping.

A full shuffle would read every shard all the time. The plan reads from few at a time:

    1. the shards, in a random order, are laid end to end and cut into L equal pieces, the *lanes* (fewer than L, if
       there are not `block` shards for each);
    2. each lane is shuffled inside a sliding block of shards: a sample of the lane's s-th shard (of S) gets the key
       s + block * u, u uniform in [0, 1), modulo S, and the lane is read in the order of the keys. So no more than
       `block` shards of a lane are in use at any time, and with block >= S the shuffle is a full one. (Modulo S makes
       the mixture the same at the ends as in the middle; the last block - 1 shards are visited twice for it.)
    3. a row takes from all lanes in turn, and its columns are sorted by lane: as ranks own columns, ranks own lanes.

Example. Two shards of four samples, two lanes, block 1, rows of four, two ranks:

    lanes   [5 4 7 6], [0 3 1 2]        rows   [5 4 0 3]     rank 0 reads 5 4, then 7 6: shard 1 only
                                               [7 6 1 2]     rank 1 reads 0 3, then 1 2: shard 0 only

Where the samples do not fill the last row, its gaps are `NO_SAMPLE`, spread evenly, so that no rank is left without.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .errors import DataError

VERSION = 1  # part of a checkpoint's fingerprint: raised whenever the same arguments give another plan
NO_SAMPLE = -1
LANES = 32
BLOCK = 8

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Plan:
    """The order of an epoch."""

    rows: NDArray[np.integer]  # (steps, global_batch)

    @property
    def steps(self) -> int:
        """Rows of the plan: optimizer steps of the epoch."""
        return len(self.rows)

    def part(self, step: int, rank: int, world_size: int) -> Indices:
        """What `rank` reads at `step`; includes the gaps of the last row."""
        return self.rows[step, rank_columns(self.rows.shape[1], rank, world_size)].astype(np.int64)


def rank_columns(global_batch: int, rank: int, world_size: int) -> slice:
    """The columns of a row that belong to a rank: contiguous, and of equal width up to one."""
    if not 0 <= rank < world_size <= global_batch:
        raise DataError(f"rank {rank} of {world_size} with a global batch of {global_batch}: no sample for some rank")
    return slice(rank * global_batch // world_size, (rank + 1) * global_batch // world_size)


def without_gaps(row: NDArray[np.integer]) -> Indices:
    """A row of which each gap shows a sample of the same row again, which has weight 0.

    So every rank gets a full batch of real images.
    """
    real = row[row != NO_SAMPLE]
    return np.where(row == NO_SAMPLE, np.resize(real, len(row)), row).astype(np.int64)


def training_plan(
    firsts: Indices,
    seed: int,
    epoch: int,
    global_batch: int,
    *,
    subset: Indices | None = None,
    lanes: int = LANES,
    block: int = BLOCK,
) -> Plan:
    """Plan an epoch over all samples, or over `subset` (ascending, without repetition).

    `firsts`, (shards + 1,), is the index of each shard's first sample, and N (`Manifest.firsts`).
    """
    _check(global_batch, lanes, block)
    words = _random_words(seed, epoch, stream=0)
    counts = np.diff(firsts) if subset is None else np.diff(np.searchsorted(subset, firsts))
    starts = np.concatenate(([0], np.cumsum(counts)))  # of each shard, within the samples to plan
    samples = int(starts[-1])
    if samples == 0:
        raise DataError("there is no sample to plan an epoch of")

    # 1. Shards in a random order, end to end. A sample is a number below `samples`: its place in `subset`.
    order = np.argsort(words.random_raw(len(counts)), kind="stable")
    order = order[counts[order] > 0]
    ends = np.cumsum(counts[order])
    shifts = starts[order] + counts[order] - ends  # from a position in that line to the sample that stands there

    # 2. Shuffle each lane, and lay it down as a column: lanes differ by one sample at most.
    lanes = _usable_lanes(len(order), lanes, block)
    turns = np.full((-(-samples // lanes), lanes), NO_SAMPLE, dtype=_dtype(samples))  # (longest lane, lanes)
    cuts = np.arange(lanes + 1) * samples // lanes
    for lane, (begin, end) in enumerate(itertools.pairwise(cuts)):
        first, last = np.searchsorted(ends, (begin, end - 1), side="right")
        inside = slice(first, last + 1)  # the lane's shards
        pieces = np.diff(np.minimum(ends[inside], end), prepend=begin)  # how much of each
        lane_samples = np.arange(begin, end) + np.repeat(shifts[inside], pieces)
        turns[: end - begin, lane] = lane_samples[_lane_order(pieces, block, words)]

    # 3. Take from all lanes in turn.
    line = turns[turns != NO_SAMPLE] if samples % lanes else turns.reshape(-1)  # (samples,)
    rows = _rows(line if subset is None else subset[line].astype(_dtype(firsts[-1])), global_batch)
    _sort_columns_by_lane(rows, lanes)
    return Plan(_spread_last(rows))


def shards_in_use(shards: int, global_batch: int, columns: slice, lanes: int = LANES, block: int = BLOCK) -> int:
    """How many shards a rank that owns `columns` reads from at a time: a block of each of its lanes, and one more."""
    lanes = _usable_lanes(shards, lanes, block)
    in_columns: set[int] = set()
    for row in range(lanes // math.gcd(lanes, global_batch)):
        in_columns.update(np.sort((row * global_batch + np.arange(global_batch)) % lanes)[columns].tolist())
    return (len(in_columns) + 1) * block


def evaluation_plan(samples: int, global_batch: int) -> Plan:
    """Every sample once, in index order, for any number of ranks."""
    _check(global_batch, 1, 1)
    return Plan(_spread_last(_rows(np.arange(samples, dtype=_dtype(samples)), global_batch)))


def balanced_subset(labels: NDArray[np.int32], classes: int, count: int, seed: int, epoch: int) -> Indices:
    """Draw about `count` samples for the epoch, the same number of each class as far as a class has them; ascending."""
    if count < classes:
        raise DataError(f"data.balanced_per_epoch = {count}: fewer than one sample for each of {classes} classes")
    draw = _random_words(seed, epoch, stream=1).random_raw(len(labels))
    order = np.lexsort((draw, labels))  # by class, at random within a class
    order = order[np.searchsorted(labels[order], 0) :]  # without unknown labels
    sizes = np.bincount(labels[order], minlength=classes)
    rank_in_class = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return np.sort(order[rank_in_class < count // classes])


def _usable_lanes(shards: int, lanes: int, block: int) -> int:
    """Thinner lanes than a block would hardly be shuffled."""
    return max(1, min(lanes, shards // block))


def _lane_order(pieces: Indices, block: int, words: np.random.Philox) -> Indices:
    """The order in which a lane reads its samples, given how many it has of each of its shards."""
    shards, samples = len(pieces), int(pieces.sum())
    shard = np.repeat(np.arange(float(shards)), pieces)
    uniform = (words.random_raw(samples) >> np.uint64(11)) * 2.0**-53
    key = shard + min(block, shards) * uniform
    key[key >= shards] -= shards
    # The key as an integer above the bits of the position: one sort of plain integers, several times faster than an
    # indirect one, orders them and settles ties. Every step is rounded in one way only, so all machines agree.
    bits = max(1, (samples - 1).bit_length())
    packed = (key * (2.0 ** (62 - bits) / shards)).astype(np.int64) << bits | np.arange(samples)
    packed.sort()
    return packed & ((1 << bits) - 1)


def _sort_columns_by_lane(rows: NDArray[np.integer], lanes: int) -> None:
    """In place. The lane of row r, column c is (r * width + c) mod lanes, so few different orders occur."""
    width = rows.shape[1]
    period = lanes // math.gcd(lanes, width)
    for first in range(min(period, len(rows))):
        order = np.argsort((first * width + np.arange(width)) % lanes, kind="stable")
        rows[first::period] = rows[first::period, order]


def _dtype(samples: int) -> type[np.integer]:
    """Half the bytes, where they do: most of the time goes into touching memory."""
    return np.int32 if samples < 2**31 else np.int64


def _rows(values: NDArray[np.integer], global_batch: int) -> NDArray[np.integer]:
    """Cut into rows, with gaps at the end of the last one."""
    rows = np.full((-(-len(values) // global_batch), global_batch), NO_SAMPLE, values.dtype)  # (steps, global_batch)
    rows.reshape(-1)[: len(values)] = values
    return rows


def _spread_last(rows: NDArray[np.integer]) -> NDArray[np.integer]:
    """Distribute the last row's samples over its columns, so that every slice of columns has its share."""
    for last in rows[-1:]:
        samples = last[last != NO_SAMPLE]
        last[:] = NO_SAMPLE
        last[np.arange(len(samples)) * len(last) // len(samples)] = samples
    return rows


def _random_words(seed: int, epoch: int, stream: int) -> np.random.Philox:
    """A generator of its own for (seed, epoch, stream). Only `random_raw` is used: numpy keeps its bits for good."""
    if seed < 0 or epoch < 0:
        raise DataError(f"seed {seed}, epoch {epoch}: neither may be negative")
    return np.random.Philox(key=seed, counter=[0, 0, epoch, stream])


def _check(global_batch: int, lanes: int, block: int) -> None:
    for name, value in (("global batch", global_batch), ("data.lanes", lanes), ("data.block", block)):
        if value < 1:
            raise DataError(f"{name} = {value}: must be at least 1")
