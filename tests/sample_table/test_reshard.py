"""Saved tables of W ranks, resharded for another number of ranks, hold the same rows: nothing lost, nothing twice."""

from __future__ import annotations

from functools import cache
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sopdist.noise.kernels import Facts
from sopdist.noise.kernels.reference import update_rows
from sopdist.noise.rates import Flow
from sopdist.noise.rows import NoiseTable
from sopdist.sample_table import reshard

CLASSES = 5
LAYOUTS = st.sampled_from(["dense", "slots"])


def part(samples: int, layout: str, first: int, stride: int) -> dict[str, Tensor]:
    """Rank `first`'s rows of a table in which sample i has been visited i mod 4 times, saved."""
    return dict(_part(samples, layout, first, stride))


@cache
def _part(samples: int, layout: str, first: int, stride: int) -> dict[str, Tensor]:
    table = NoiseTable(samples, CLASSES, layout=layout, slots=3, seed=7, first=first, stride=stride)
    mine = torch.arange(samples)[first::stride]
    for visit in range(1, 4):
        rows = (mine % 4 >= visit).nonzero().flatten()
        seen = mine[rows]
        facts = Facts((seen + visit) % CLASSES, seen * 0.25 + visit, -seen * 0.5, torch.ones(len(seen)), seen * 0.125)
        if len(rows):
            update_rows(table, rows, seen % CLASSES, facts, Flow(2).step())
    table.skipped[:] = torch.tensor([first + 1, 10 * (first + 1)])
    return {name: value.clone() for name, value in table.state_dict().items()}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@settings(max_examples=40)
@given(st.integers(1, 40), LAYOUTS, st.integers(1, 6), st.integers(1, 6), st.randoms(use_true_random=False))
def test_resharding_between_any_two_numbers_of_ranks_gives_what_these_would_have_saved(
    samples: int, layout: str, before: int, after: int, random: Random
) -> None:
    saved = [part(samples, layout, rank, before) for rank in range(before)]
    random.shuffle(saved)
    skipped = torch.zeros(2, dtype=torch.int64)
    for rank in range(after):
        resharded, wanted = reshard(saved, rank, after), part(samples, layout, rank, after)
        skipped += resharded.pop("skipped")
        del wanted["skipped"]
        assert equal(resharded, wanted)
    total = before * (before + 1) // 2
    assert skipped.tolist() == [total, 10 * total]


@settings(max_examples=40)
@given(st.integers(1, 40), LAYOUTS, st.integers(1, 6), st.integers(1, 6))
def test_resharding_back_and_forth_changes_no_bit(samples: int, layout: str, before: int, after: int) -> None:
    saved = [part(samples, layout, rank, before) for rank in range(before)]
    there = [reshard(saved, rank, after) for rank in range(after)]
    for rank in range(before):
        back = reshard(there, rank, before)
        assert equal({**back, "skipped": saved[rank]["skipped"]}, saved[rank])


@settings(max_examples=40)
@given(st.integers(2, 40), LAYOUTS, st.integers(1, 6), st.integers(1, 6))
def test_a_resharded_table_loads_into_a_table_of_either_layout(
    samples: int, layout: str, before: int, after: int
) -> None:
    saved = [part(samples, layout, rank, before) for rank in range(before)]
    whole = NoiseTable(samples, CLASSES, layout="dense", seed=7)
    whole.load_state_dict(reshard(saved, 0, 1))
    for rank in range(min(after, samples)):
        for into in ("dense", "slots"):
            table = NoiseTable(samples, CLASSES, layout=into, slots=CLASSES, seed=7, first=rank, stride=after)
            table.load_state_dict(reshard(saved, rank, after))
            assert torch.equal(table.dense_v(torch.arange(len(table))), whole.v[rank::after])
            assert torch.equal(table.visits, whole.visits[rank::after])


def test_parts_that_do_not_belong_together_are_refused() -> None:
    saved = [part(11, "dense", rank, 3) for rank in range(3)]
    for wrong in (saved[:2], saved[1:], [*saved, saved[0]], [saved[0], saved[0], saved[2]]):
        with pytest.raises(ValueError, match=f"the {len(wrong)} parts of the table do not belong together"):
            reshard(wrong, 0, 1)
    with pytest.raises(ValueError, match="do not belong together"):
        reshard([saved[0], saved[1], part(12, "dense", 2, 3)], 0, 1)
