"""The clock of a run: every moment belongs to exactly one part."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sopdist.train.record.clock import Clock


class FakeTime:
    """A fake time that passes only on request."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def time() -> FakeTime:
    return FakeTime()


def test_time_outside_all_parts_is_compute_and_evaluation_is_not_in_the_total(time: FakeTime) -> None:
    clock = Clock(time)
    with clock.part("data"):
        time.advance(2)
    time.advance(7)
    with clock.part("evaluate"):
        time.advance(5)
    clock.add("exchange", 1.0)
    lap = clock.lap()
    assert lap == {"data": 2, "exchange": 1, "checkpoint": 0, "compute": 6, "evaluate": 5, "total": 9}
    time.advance(3)
    assert clock.lap() == {"data": 0, "exchange": 0, "checkpoint": 0, "compute": 3, "evaluate": 0, "total": 3}


def test_an_inner_part_is_not_counted_twice(time: FakeTime) -> None:
    clock = Clock(time)
    with clock.part("evaluate"):
        time.advance(1)
        with clock.part("checkpoint"):
            time.advance(10)
        time.advance(1)
    lap = clock.lap()
    assert (lap["evaluate"], lap["checkpoint"], lap["compute"], lap["total"]) == (2, 10, 0, 10)


def test_a_lap_in_the_middle_of_a_part_splits_it(time: FakeTime) -> None:
    clock = Clock(time)
    with clock.part("data"):
        time.advance(2)
        assert clock.lap()["data"] == 2
        time.advance(3)
    assert clock.lap()["data"] == 3


def test_a_part_that_raises_is_counted_and_ended(time: FakeTime) -> None:
    clock = Clock(time)

    def fail() -> None:
        with clock.part("checkpoint"):
            time.advance(4)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    time.advance(1)
    lap = clock.lap()
    assert (lap["checkpoint"], lap["compute"]) == (4, 1)


def test_waiting_for_items_is_timed_but_processing_them_is_not(time: FakeTime) -> None:
    closed = []

    def items() -> Iterator[int]:
        try:
            for number in range(10):
                time.advance(2)
                yield number
        finally:
            closed.append(True)

    clock = Clock(time)
    batches = clock.timed("data", items())
    taken = []
    for _, number in zip(range(3), batches, strict=False):
        taken.append(number)
        time.advance(5)
    lap = clock.lap()
    assert taken == [0, 1, 2]
    assert (lap["data"], lap["compute"]) == (6, 15)
    assert not closed
    batches.close()  # type: ignore[attr-defined]
    assert closed, "a loop that ends early leaves nothing running"
    assert list(clock.timed("data", [1, 2])) == [1, 2]


_PARTS = st.sampled_from(["data", "exchange", "checkpoint", "evaluate"])
_TREES = st.recursive(
    st.integers(0, 50), lambda inner: st.lists(st.one_of(st.tuples(_PARTS, inner), inner), max_size=4), max_leaves=20
)


@given(_TREES)
def test_nested_parts_add_up_to_the_elapsed_time(tree: Any) -> None:
    time = FakeTime()
    clock = Clock(time)

    def walk(node: Any) -> None:
        if isinstance(node, int):
            time.advance(node)
        elif isinstance(node, tuple):
            with clock.part(node[0]):
                walk(node[1])
        else:
            for inner in node:
                walk(inner)

    walk(tree)
    lap = clock.lap()
    assert lap["total"] + lap["evaluate"] == time.now - 100
    assert all(seconds >= 0 for seconds in lap.values())
