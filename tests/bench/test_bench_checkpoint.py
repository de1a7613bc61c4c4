"""`sopdist bench checkpoint`: real saves by two ranks, and results that follow from the measured times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sopdist.bench.checkpoint import blocked_seconds, judge
from sopdist.bench.checkpoint_turns import BACKGROUND, SYNCHRONOUS, TORCH
from sopdist.bench.timing import paired_ratio
from sopdist.cli import main


def test_a_quick_run_makes_every_kind_of_save_and_counts_the_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "checkpoint.json"
    assert main(["bench", "checkpoint", "--quick", "--folder", str(tmp_path), "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["environment"].keys() >= {"torch", "sopdist", "cpu_count", "load", "date"}
    assert found["saves"].keys() == {BACKGROUND, SYNCHRONOUS, TORCH}
    for name, of_ranks in found["saves"].items():
        assert len(of_ranks) == found["ranks"] == 2
        for blocked, total, before, during in (turn for turns in of_ranks for turn in turns):
            assert 0 < blocked <= total
            assert before > 0
            assert (during > 0) == (name == BACKGROUND)
    # u, two means and visits, four bytes each; v and classes of eight slots, or v of all classes; part of the header
    assert found["table_bytes_per_row"]["slots"] == pytest.approx(16 + 8 * 6 + 8, abs=9)
    assert found["table_bytes_per_row"]["dense"] == pytest.approx(16 + 4000, abs=9)
    assert [verdict["met"] for verdict in found["verdicts"]] == [True, None, None], (
        "a quick run is too short to judge times"
    )
    assert not list(tmp_path.glob("sopdist-bench-*")), "checkpoints are deleted"
    assert str(out) in capsys.readouterr().out


def test_the_rank_that_is_blocked_longest_counts() -> None:
    ranks = [
        {"turns": {SYNCHRONOUS: [[0.1, 1.0, 1.0, 0.0], [0.4, 1, 1, 0]]}},
        {"turns": {SYNCHRONOUS: [[0.3, 1, 1, 0], [0.2, 1, 1, 0]]}},
    ]
    assert blocked_seconds(ranks, SYNCHRONOUS) == [0.3, 0.4]


@pytest.mark.parametrize(("blocked", "met"), [(0.05, True), (0.2, False)])
def test_verdicts_follow_from_the_measurements(blocked: float, met: bool) -> None:
    verdicts = judge(paired_ratio([blocked] * 9, [1.0] * 9), {"slots": 80.0, "dense": 4000.0}, 1.0)
    assert [verdict.met for verdict in verdicts] == [True, met, True]
    verdicts = judge(None, {"slots": 200.0, "dense": 4000.0}, 2.0)
    assert [verdict.met for verdict in verdicts] == [False, None, False]
