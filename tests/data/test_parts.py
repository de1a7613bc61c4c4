"""Epochs with several parts: what each part contributes to every batch, on any number of ranks."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from sopdist.data.parts import Part, PlanPart, plan_parts
from sopdist.data.plan import NO_SAMPLE, Plan, rank_columns, training_plan
from tests.support.streams import BATCH, SAMPLES, open_stream

FIRSTS = np.array([0, 7, 12, 30, 41, 60])  # of five shards
ALL = 60


def planner(seed: int = 0, epoch: int = 0, batch: int = 8) -> PlanPart:
    """As the stream plans a part."""

    def plan(part: Part, stream: int) -> Plan:
        return training_plan(FIRSTS, seed, epoch, part.columns or batch, subset=part.samples, stream=stream)

    return plan


def in_part(plan: Plan, number: int) -> NDArray[np.integer]:
    """The columns of a part, (steps, columns)."""
    assert plan.part_of_column is not None
    return plan.batches[:, plan.part_of_column == number]


samples_of_part = st.sets(st.integers(0, ALL - 1), min_size=1).map(lambda chosen: np.array(sorted(chosen)))
parts_ = st.lists(st.builds(Part, samples_of_part, st.integers(1, 9)), min_size=2, max_size=5)
seeds = st.integers(0, 2**63)


@given(parts_, seeds, st.integers(0, 1000))
def test_the_first_part_is_passed_once_and_the_others_as_often_as_needed(
    parts: list[Part], seed: int, epoch: int
) -> None:
    plan = plan_parts(parts, planner(seed, epoch))
    first = parts[0]
    assert first.samples is not None
    assert plan.steps == -(-len(first.samples) // first.columns)
    assert plan.batches.shape[1] == sum(part.columns for part in parts)
    leading = in_part(plan, 0)
    assert sorted(leading[leading != NO_SAMPLE].tolist()) == first.samples.tolist(), "each sample once"
    assert (leading[:-1] != NO_SAMPLE).all(), "only the last batch has padding"
    for number, part in enumerate(parts[1:], 1):
        assert part.samples is not None
        found = in_part(plan, number)
        assert found.shape == (plan.steps, part.columns)
        assert (found != NO_SAMPLE).all()
        counts = Counter(dict.fromkeys(part.samples.tolist(), 0))
        counts.update(found.reshape(-1).tolist())
        assert counts.keys() == set(part.samples.tolist())
        assert max(counts.values()) - min(counts.values()) <= 1, "never a pass ahead"


@given(parts_, seeds)
def test_a_pass_over_a_part_ends_before_the_next_one_begins_in_another_order(parts: list[Part], seed: int) -> None:
    plan = plan_parts(parts, planner(seed))
    for number, part in enumerate(parts[1:], 1):
        assert part.samples is not None
        sequence, size = in_part(plan, number).reshape(-1).tolist(), len(part.samples)
        passes = [sequence[start : start + size] for start in range(0, len(sequence), size)]
        assert all(len(set(one)) == len(one) for one in passes)
        if size > 10 and len(passes) > 2:
            assert passes[0] != passes[1]


def shares_of_ranks(columns: list[int], ranks: int) -> list[list[int]]:
    """How many columns of each part each rank has, by part."""
    plan = plan_parts([Part(np.arange(ALL), width) for width in columns], planner())
    assert plan.part_of_column is not None
    mine = [plan.part_of_column[rank_columns(sum(columns), rank, ranks)] for rank in range(ranks)]
    return [[int((of_rank == number).sum()) for of_rank in mine] for number in range(len(columns))]


@given(st.integers(1, 40), st.integers(2, 8), st.integers(1, 9))
def test_ranks_have_the_same_share_of_parts_of_equal_width_up_to_one_column(width: int, parts: int, ranks: int) -> None:
    """As in DivideMix."""
    for shares in shares_of_ranks([width] * parts, min(ranks, parts * width)):
        assert max(shares) - min(shares) <= 1


@given(st.integers(1, 9), st.integers(1, 20), st.data())
def test_ranks_of_equal_width_have_the_same_share_of_two_parts_up_to_one_column(
    ranks: int, width: int, data: st.DataObject
) -> None:
    """As in CORES2*."""
    if ranks * width < 2:
        return
    second = data.draw(st.integers(1, ranks * width - 1))
    for shares in shares_of_ranks([ranks * width - second, second], ranks):
        assert max(shares) - min(shares) <= 1


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 9))
def test_a_rank_is_never_a_column_off_its_exact_share_of_two_parts(first: int, second: int, ranks: int) -> None:
    ranks, total = min(ranks, first + second), first + second
    widths = [columns.stop - columns.start for columns in (rank_columns(total, rank, ranks) for rank in range(ranks))]
    for columns, shares in zip((first, second), shares_of_ranks([first, second], ranks), strict=True):
        for width, share in zip(widths, shares, strict=True):
            assert abs(share - columns * width / total) < 1


@given(parts_, seeds, st.integers(1, 9))
def test_the_ranks_together_read_the_same_batches(parts: list[Part], seed: int, ranks: int) -> None:
    plan = plan_parts(parts, planner(seed))
    if ranks > plan.batches.shape[1]:
        return
    for step in range(plan.steps):
        read = [plan.part(step, rank, ranks) for rank in range(ranks)]
        assert np.array_equal(np.concatenate(read), plan.batches[step])


@given(seeds, st.integers(0, 1000), st.integers(1, 70), st.booleans())
def test_one_part_is_the_plain_plan(seed: int, epoch: int, batch: int, some: bool) -> None:
    samples = np.arange(0, ALL, 3) if some else None
    found = plan_parts([Part(samples)], planner(seed, epoch, batch))
    assert found.part_of_column is None
    assert np.array_equal(found.batches, training_plan(FIRSTS, seed, epoch, batch, subset=samples).batches)


@given(parts_, seeds)
def test_a_later_part_without_samples_gets_no_columns_and_the_others_keep_their_numbers(
    parts: list[Part], seed: int
) -> None:
    nothing = Part(np.array([], dtype=np.int64), 3)
    with_empty = plan_parts([parts[0], nothing, *parts[1:]], planner(seed))
    assert with_empty.part_of_column is not None
    assert set(with_empty.part_of_column.tolist()) == {0, *range(2, len(parts) + 1)}
    assert with_empty.batches.shape[1] == sum(part.columns for part in parts)
    only = plan_parts([parts[0], nothing], planner(seed))
    assert np.array_equal(only.batches, plan_parts(parts[:1], planner(seed)).batches)
    assert only.part_of_column is not None, "there is still more than one part"


def test_the_example_of_the_docstring() -> None:
    """Part 0 has samples 0 to 3 in 2 columns, part 1 has samples 4 to 6 in 1 column."""
    order = {0: [[2, 0], [1, 3]], 1: [[5], [6], [4]]}

    def planned(part: Part, _: int) -> Plan:
        assert part.samples is not None
        return Plan(np.array(order[int(part.samples[0] == 4)]))

    plan = plan_parts([Part(np.arange(4), 2), Part(np.arange(4, 7), 1)], planned)
    assert plan.batches.tolist() == [[2, 5, 0], [1, 6, 3]]
    assert plan.part_of_column is not None
    assert plan.part_of_column.tolist() == [0, 1, 0]
    read = [[plan.part(step, rank, 2).tolist() for step in range(2)] for rank in range(2)]
    assert read == [[[2], [1]], [[5, 0], [6, 3]]]


def streams_of_passes() -> list[int]:
    """Those of an epoch with the largest number of parts, most of which are passed several times."""
    asked: list[int] = []

    def planned(part: Part, stream: int) -> Plan:
        asked.append(stream)
        return planner()(part, stream)

    plan_parts([Part(np.arange(40), 2), *(Part(np.arange(3), 2) for _ in range(7))], planned)
    return asked


def test_every_pass_takes_random_numbers_of_its_own() -> None:
    streams = streams_of_passes()
    assert len(streams) > 50
    assert len(set(streams)) == len(streams)
    assert streams[0] == 0, "that of the plain plan"


def test_no_pass_takes_the_random_numbers_of_another_purpose() -> None:
    """Stream 1 belongs to balanced draws, 3 to 6 to the methods, whose counters are steps (`GlobalBatch.draws`)."""
    assert not set(streams_of_passes()) & {1, 3, 4, 5, 6}


def test_more_than_eight_parts_are_refused() -> None:
    with pytest.raises(ValueError, match="9 parts; at most 8 are possible"):
        plan_parts([Part(np.arange(4), 1)] * 9, planner())


# -- the stream --------------------------------------------------------------------------------------------------------

PARTS = (Part(np.arange(0, SAMPLES, 2), 4), Part(np.arange(1, SAMPLES, 4), 2), Part(np.array([3, 7, 11]), 5))


def test_batches_of_the_stream_say_which_part_each_sample_is_of(folder: Path) -> None:
    by_rank = {}
    for ranks in (1, 3):
        found = []
        for rank in range(ranks):
            with open_stream(folder, rank=rank, world_size=ranks) as stream:
                plan = stream.plan(2, PARTS)
                batches = list(stream.epoch(2, parts=PARTS))
            assert len(batches) == plan.steps
            for step, batch in enumerate(batches):
                assert batch.part is not None
                for index, part, weight in zip(batch.index, batch.part, batch.weight, strict=True):
                    if weight > 0:
                        found.append((step, int(index), int(part)))
                        assert int(index) in PARTS[int(part)].samples
        by_rank[ranks] = sorted(found)
    assert by_rank[1] == by_rank[3]
    assert sorted(index for _, index, part in by_rank[1] if part == 0) == list(range(0, SAMPLES, 2))


def test_the_stream_resumes_in_the_middle_of_parts(folder: Path) -> None:
    with open_stream(folder) as stream:
        whole = [batch.index.tolist() for batch in stream.epoch(1, parts=PARTS)]
        rest = [batch.index.tolist() for batch in stream.epoch(1, start=3, parts=PARTS)]
    assert rest == whole[3:]


def test_without_parts_the_stream_plans_as_before(folder: Path) -> None:
    with open_stream(folder) as stream:
        firsts = stream.split.manifest.firsts
        settings = stream.settings
        for epoch in range(3):
            expected = training_plan(firsts, 1, epoch, BATCH, lanes=settings.lanes, block=settings.block)
            assert np.array_equal(stream.plan(epoch).batches, expected.batches)
        assert next(iter(stream.epoch(0))).part is None


def test_a_balanced_draw_applies_to_every_part(folder: Path) -> None:
    with open_stream(folder, balanced_per_epoch=30) as stream:
        drawn = stream.drawn(4)
        assert drawn is not None
        plan = stream.plan(4, PARTS)
        for number, part in enumerate(PARTS):
            possible = set(part.samples.tolist()) & set(drawn.tolist())
            found = [int(index) for index in in_part(plan, number).reshape(-1) if index != NO_SAMPLE]
            assert set(found) <= possible
            if number == 0:
                assert sorted(found) == sorted(possible)


def test_epochs_order_each_part_anew(folder: Path) -> None:
    with open_stream(folder) as stream:
        plans = [stream.plan(epoch, PARTS) for epoch in range(3)]
    for number in range(2):
        orders = [in_part(plan, number).reshape(-1).tolist() for plan in plans]
        assert all(a != b for a, b in itertools.pairwise(orders))
