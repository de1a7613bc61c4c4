"""`sopdist bench exchange`: bytes against a manual count, and results that follow from the measured times."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sopdist.bench.exchange import CLASSES, Found, computed_bytes, find, judge, part_three, part_two
from sopdist.bench.exchange_turns import Cell, StepTime, draw_batches
from sopdist.cli import main


def test_a_quick_run_sends_the_bytes_that_were_computed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "exchange.json"
    assert main(["bench", "exchange", "--quick", "--out", str(out)]) == 0
    found = json.loads(out.read_text())

    assert found["environment"].keys() >= {"torch", "sopdist", "cpu_count", "load", "date"}
    assert found["ranks"] == 2
    kinds = {(cell["classes"], cell["layout"], cell["mode"]): cell for cell in found["cells"]}
    expected_bytes = {  # u; v; classes of two bytes; six facts of four bytes
        (10, "dense"): 4 + 10 * 4 + 24,
        (100, "slots"): 4 + 8 * (4 + 2) + 24,
        (1000, "slots"): 4 + 8 * (4 + 2) + 24,
        (1000, "dense"): 4 + 1000 * 4 + 24,
    }
    assert {kind[:2] for kind in kinds} == set(expected_bytes)
    for (classes, layout, mode), cell in kinds.items():
        expected = expected_bytes[classes, layout] + (8 if mode == "on request" else 0)  # the index of a request
        assert cell["computed_bytes"] == expected
        assert cell["sent_bytes"] == pytest.approx(expected)
    for cell in found["cells"]:
        assert cell["seconds"].keys() == {"push", "rows", "facts", "update"}
        assert all(0 <= lower <= middle <= upper for middle, lower, upper in cell["seconds"].values())
        assert cell["step"] > 0
        assert 0 <= cell["blocked"] < 1
    assert [verdict["met"] for verdict in found["verdicts"]] == [True]

    printed = capsys.readouterr().out
    assert "1/105.4" in printed, "2 x 4004 / 76"
    assert str(out) in printed


def test_the_cells_cover_all_sizes_layouts_and_modes() -> None:
    cells = part_two(CLASSES, (128, 1024), 0.03)
    assert {(cell.classes, cell.layout) for cell in cells} == {
        (10, "dense"), (100, "slots"), (1000, "slots"), (1000, "dense"),
    }  # fmt: skip
    assert {cell.mode for cell in cells} == {"ahead", "on request"}
    assert {cell.batch for cell in cells} == {128, 1024}
    assert len(set(cells)) == len(cells) == 16
    assert {cell.compute for cell in part_three(1000, 256, (0.003, 0.1))} == {0.003, 0.1}
    assert {cell.layout for cell in part_two((10,), (8,), 0.0)} == {"dense"}, "no duplicates"


@given(ranks=st.integers(2, 5), share=st.integers(1, 6), steps=st.integers(1, 4), rest=st.integers(0, 3))
def test_batches_are_disjoint_and_have_equally_many_samples_of_each_owner(
    ranks: int, share: int, steps: int, rest: int
) -> None:
    batch = share * ranks
    samples = steps * ranks * batch + rest
    batches = draw_batches(samples, batch, ranks)
    assert batches.shape == (steps, ranks, batch)
    assert len(np.unique(batches)) == batches.size
    assert batches.min() >= 0
    assert batches.max() < samples
    for owner in range(ranks):
        assert ((batches % ranks == owner).sum(axis=2) == share).all()


def _turn(blocked: float, in_flight: float, total: float = 1.0, sent: float = 340.0) -> list[StepTime]:
    first = StepTime(50.0, 9, 9, 9, 9, 9, 0, sent)  # must not count
    return [first, StepTime(total, 0.1, 0.2, 0.3, 0.4, blocked, in_flight, sent)]


def test_results_follow_from_the_turns() -> None:
    cell = Cell(10, "dense", 10, 0.0, "ahead")
    found = find(cell, [[_turn(0.1, 0.5), _turn(0.1, 0.5)], [_turn(0.3, 0.5), _turn(0.1, 0.5, total=3.0)]])
    assert found.blocked == pytest.approx(0.1), "0.2 of 2 seconds, and 0.4 of 4"
    assert found.overlapped == pytest.approx(1 - 0.6 / 2)
    assert found.sent_bytes == pytest.approx(340 / 5), "half of ten samples belong to the other rank"
    assert found.computed_bytes == 68
    assert found.step == 1.0
    assert found.seconds["update"] == pytest.approx((0.4, 0.4, 0.4))


def test_the_verdict_follows_from_the_bytes() -> None:
    def verdict(sent: float, cell: Cell) -> bool | None:
        found = Found({}, 1.0, 0.0, None, computed_bytes(cell), sent)
        return judge({cell: found})[0].met

    cell = Cell(1000, "slots", 128, 0.03, "ahead")
    assert verdict(72.0, cell) is True
    assert verdict(8008 / 40 + 1, cell) is False
    assert verdict(72.0, Cell(100, "slots", 128, 0.03, "ahead")) is None
