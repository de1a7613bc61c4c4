"""Guarantees of the plan, over shard counts and sizes, lanes, batch sizes and world sizes."""

from __future__ import annotations

import hashlib
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sopdist.data.plan import (
    NO_SAMPLE,
    Indices,
    _lane_order,
    balanced_subset,
    evaluation_plan,
    rank_columns,
    shards_in_use,
    training_plan,
)
from sopdist.errors import DataError

shard_sizes = st.lists(st.integers(1, 30), min_size=1, max_size=25)
batch_sizes = st.integers(1, 70)
worlds = st.integers(1, 9)
lanes_ = st.integers(1, 40)
blocks = st.integers(1, 12)
seeds = st.integers(0, 2**63)
epochs = st.integers(0, 2**31)


def firsts_of(sizes: list[int]) -> Indices:
    return np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)


def real(indices: np.ndarray) -> np.ndarray:
    return indices[indices != NO_SAMPLE]


@given(shard_sizes, seeds, epochs, batch_sizes, lanes_, blocks)
def test_each_sample_occurs_in_the_plan_exactly_once(
    sizes: list[int], seed: int, epoch: int, batch: int, lanes: int, block: int
) -> None:
    plan = training_plan(firsts_of(sizes), seed, epoch, batch, lanes=lanes, block=block)
    assert plan.batches.shape == (-(-sum(sizes) // batch), batch)
    assert np.array_equal(np.sort(real(plan.batches)), np.arange(sum(sizes)))
    assert (plan.batches[:-1] != NO_SAMPLE).all(), "only the last batch has padding"


@given(shard_sizes, seeds, batch_sizes, worlds)
def test_the_ranks_together_read_each_batch_at_any_world_size(
    sizes: list[int], seed: int, batch: int, world: int
) -> None:
    plan = training_plan(firsts_of(sizes), seed, 0, batch)
    if world > batch:
        with pytest.raises(DataError, match="some rank would get no sample"):
            plan.part(0, 0, world)
        return
    for step in range(plan.steps):
        parts = [plan.part(step, rank, world) for rank in range(world)]
        assert np.array_equal(np.concatenate(parts), plan.batches[step])
        widths = [len(part) for part in parts]
        assert max(widths) - min(widths) <= 1


@given(st.integers(1, 200), batch_sizes, worlds)
def test_the_padding_in_the_last_batch_is_spread_evenly(samples: int, batch: int, world: int) -> None:
    plan = evaluation_plan(samples, batch)
    if world <= batch and batch % world == 0:
        shares = [len(real(plan.part(plan.steps - 1, rank, world))) for rank in range(world)]
        assert max(shares) - min(shares) <= 1


@given(shard_sizes, seeds, st.integers(0, 50), batch_sizes)
def test_the_plan_is_a_pure_function_that_changes_with_seed_and_epoch(
    sizes: list[int], seed: int, epoch: int, batch: int
) -> None:
    firsts = firsts_of(sizes)
    plan = training_plan(firsts, seed, epoch, batch)
    assert np.array_equal(plan.batches, training_plan(firsts, seed, epoch, batch).batches)
    if sum(sizes) > 20:  # 20! orders: they cannot be equal by chance
        assert not np.array_equal(plan.batches, training_plan(firsts, seed, epoch + 1, batch).batches)
        assert not np.array_equal(plan.batches, training_plan(firsts, seed + 1, epoch, batch).batches)


def test_the_order_never_changes_silently() -> None:
    """A saved run resumes in the middle of this order: if it must change, increase plan.VERSION."""
    plan = training_plan(firsts_of([5, 3, 8, 1, 7]), seed=7, epoch=3, global_batch=6, lanes=2, block=2)
    assert plan.batches.tolist() == FROZEN
    large = training_plan(firsts_of([1000] * 70 + [123]), seed=1, epoch=2, global_batch=48)
    assert hashlib.sha256(large.batches.astype("<i8").tobytes()).hexdigest()[:16] == FROZEN_LARGE


FROZEN = [[15, 11, 20, 16, 23, 22], [12, 14, 13, 1, 21, 2], [17, 18, 9, 3, 5, 7], [10, 8, 19, 0, 4, 6]]
FROZEN_LARGE = "9e8f1430da3248d5"


@given(shard_sizes, seeds, blocks)
def test_a_lane_is_read_from_a_sliding_block_of_shards(sizes: list[int], seed: int, block: int) -> None:
    """There is a position t that never decreases, so that each sample's shard s is in (t - block, t], modulo S."""
    order = _lane_order(np.array(sizes), block, np.random.Philox(key=seed))
    assert np.array_equal(np.sort(order), np.arange(sum(sizes)))
    shards, t = len(sizes), 0
    for shard in np.repeat(np.arange(shards), sizes)[order].tolist():
        if shard - shards + block > t:  # read at the start of the lane, because of the modulo
            continue
        assert shard + block > t, "read after the block had moved past it"
        t = max(t, shard)


def test_each_rank_owns_lanes_and_reads_only_its_share_of_the_shards() -> None:
    firsts = firsts_of([100] * 64)
    plan = training_plan(firsts, seed=0, epoch=0, global_batch=64, lanes=16, block=2)
    for rank in range(4):
        read = np.unique(plan.batches[:, rank * 16 : (rank + 1) * 16] // 100)
        assert len(read) == 16


@given(shard_sizes, seeds, batch_sizes, st.data())
def test_each_sample_of_a_subset_occurs_exactly_once(
    sizes: list[int], seed: int, batch: int, data: st.DataObject
) -> None:
    firsts = firsts_of(sizes)
    chosen = np.array(sorted(data.draw(st.sets(st.integers(0, int(firsts[-1]) - 1), min_size=1))), dtype=np.int64)
    plan = training_plan(firsts, seed, 0, batch, subset=chosen)
    assert np.array_equal(np.sort(real(plan.batches)), chosen)


@given(st.integers(1, 6), st.integers(1, 200), seeds, st.data())
def test_a_balanced_subset_takes_the_same_number_of_each_class(
    classes: int, samples: int, seed: int, data: st.DataObject
) -> None:
    labels = np.array(data.draw(st.lists(st.integers(-1, classes - 1), min_size=samples, max_size=samples)), np.int32)
    count = data.draw(st.integers(classes, 2 * samples + classes))
    chosen = balanced_subset(labels, classes, count, seed, epoch=0)
    assert (np.diff(chosen) > 0).all(), "ascending, without duplicates"
    for label in range(classes):
        assert (labels[chosen] == label).sum() == min((labels == label).sum(), count // classes)
    assert (labels[chosen] >= 0).all(), "samples with unknown labels are never drawn"


def test_balanced_subsets_differ_between_epochs_and_cover_the_split() -> None:
    labels = np.repeat(np.arange(4, dtype=np.int32), 100)
    draws = [balanced_subset(labels, 4, 80, seed=0, epoch=epoch) for epoch in range(40)]
    assert not np.array_equal(draws[0], draws[1])
    assert len(np.unique(np.concatenate(draws))) == 400


@given(st.integers(1, 300), batch_sizes, worlds)
def test_an_evaluation_reads_every_sample_once_at_any_world_size(samples: int, batch: int, world: int) -> None:
    if world > batch:
        return
    plan = evaluation_plan(samples, batch)
    read = [plan.part(step, rank, world) for step, rank in itertools.product(range(plan.steps), range(world))]
    assert np.array_equal(np.sort(real(np.concatenate(read))), np.arange(samples))


def test_few_shards_are_shuffled_fully() -> None:
    """With at most `block` shards per lane, the order is as good as uniform: position and index are uncorrelated."""
    firsts = firsts_of([500] * 40)
    positions = real(training_plan(firsts, seed=0, epoch=0, global_batch=100).batches)
    correlation = np.corrcoef(np.arange(len(positions)), positions)[0, 1]
    assert abs(correlation) < 4 / np.sqrt(len(positions))


def test_impossible_plans_are_refused() -> None:
    firsts = firsts_of([4])
    for arguments, message in (
        ({"global_batch": 0}, "global batch = 0"),
        ({"lanes": 0}, "data.lanes = 0"),
        ({"block": 0}, "data.block = 0"),
        ({"seed": -1}, "seed -1"),
    ):
        with pytest.raises(DataError, match=message):
            training_plan(firsts, **{"seed": 0, "epoch": 0, "global_batch": 2, **arguments})
    with pytest.raises(DataError, match="there are no samples"):
        training_plan(firsts, 0, 0, 2, subset=np.array([], dtype=np.int64))
    with pytest.raises(DataError, match="balanced_per_epoch = 3"):
        balanced_subset(np.zeros(9, np.int32), 4, 3, 0, 0)


@given(st.lists(st.integers(5, 30), min_size=4, max_size=60), st.integers(1, 40), st.integers(1, 6), lanes_, blocks)
def test_with_shards_in_use_open_files_each_shard_is_opened_only_a_few_times(
    sizes: list[int], batch: int, world: int, lanes: int, block: int
) -> None:
    """With this many shards kept open, a rank opens a shard once for each time that a lane or a block reaches it."""
    world = min(world, batch)
    firsts = firsts_of(sizes)
    plan = training_plan(firsts, 0, 0, batch, lanes=lanes, block=block)
    for rank in range(world):
        columns = rank_columns(batch, rank, world)
        limit = shards_in_use(len(sizes), batch, columns, lanes, block)
        read = real(plan.batches[:, columns].reshape(-1))
        opened, kept_open = 0, dict[int, None]()
        for shard in (np.searchsorted(firsts, read, side="right") - 1).tolist():
            opened += shard not in kept_open
            kept_open.pop(shard, None)
            kept_open[shard] = None
            if len(kept_open) > limit:
                del kept_open[next(iter(kept_open))]
        usable = max(1, min(lanes, len(sizes) // block))
        assert opened <= 2 * len(sizes) + usable * (block + 1)
