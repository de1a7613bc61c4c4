"""`sopdist bench checkpoint`: real saves by two ranks; what is written down follows from what the ranks measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sopdist.bench.checkpoint import judge, stood_still
from sopdist.bench.checkpoint_turns import BACKGROUND, NOW, TORCH
from sopdist.bench.turns import paired_ratio
from sopdist.cli import main


def test_a_quick_run_saves_in_every_way_and_counts_the_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "checkpoint.json"
    assert main(["bench", "checkpoint", "--quick", "--folder", str(tmp_path), "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["environment"].keys() >= {"torch", "sopdist", "cpu_count", "load", "date"}
    assert found["saves"].keys() == {BACKGROUND, NOW, TORCH}
    for name, of_ranks in found["saves"].items():
        assert len(of_ranks) == found["ranks"] == 2
        for still, whole, before, meanwhile in (turn for turns in of_ranks for turn in turns):
            assert 0 < still <= whole
            assert before > 0
            assert (meanwhile > 0) == (name == BACKGROUND)
    # u, two means, visits: four bytes each; v and classes of eight slots, or v of all classes; and some of the header
    assert found["table_bytes_a_row"]["slots"] == pytest.approx(16 + 8 * 6 + 8, abs=9)
    assert found["table_bytes_a_row"]["dense"] == pytest.approx(16 + 4000, abs=9)
    assert [verdict["met"] for verdict in found["verdicts"]] == [True, None, None], "a quick run judges no times"
    assert not list(tmp_path.glob("sopdist-bench-*")), "checkpoints are removed"
    assert str(out) in capsys.readouterr().out


def test_the_rank_that_stands_longest_counts() -> None:
    ranks = [
        {"turns": {NOW: [[0.1, 1.0, 1.0, 0.0], [0.4, 1, 1, 0]]}},
        {"turns": {NOW: [[0.3, 1, 1, 0], [0.2, 1, 1, 0]]}},
    ]
    assert stood_still(ranks, NOW) == [0.3, 0.4]


@pytest.mark.parametrize(("still", "met"), [(0.05, True), (0.2, False)])
def test_a_target_is_judged_by_what_was_measured(still: float, met: bool) -> None:
    verdicts = judge(paired_ratio([still] * 9, [1.0] * 9), {"slots": 80.0, "dense": 4000.0}, 1.0)
    assert [verdict.met for verdict in verdicts] == [True, met, True]
    verdicts = judge(None, {"slots": 200.0, "dense": 4000.0}, 2.0)
    assert [verdict.met for verdict in verdicts] == [False, None, False]
