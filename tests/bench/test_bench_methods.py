"""`sopdist bench methods`: the time of an epoch from the record of a run, verdicts, and a small run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sopdist.bench.methods import METHODS, PAPER, Result, judge, seconds_per_epoch
from sopdist.bench.timing import paired_ratio
from sopdist.cli import main
from sopdist.methods import METHODS as ALL_METHODS


def test_the_time_of_an_epoch_is_that_of_its_steps_after_the_first_epoch(tmp_path: Path) -> None:
    lines = [
        {"kind": "train", "epoch": 0, "samples": 100, "samples_per_second": 1.0},
        {"kind": "train", "epoch": 1, "samples": 60, "samples_per_second": 10.0},
        {"kind": "train", "epoch": 1, "samples": 40, "samples_per_second": 20.0},
        {"kind": "eval", "epoch": 1, "val/top1": 0.5},
        {"kind": "train", "epoch": 2, "samples": 100, "samples_per_second": 50.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert seconds_per_epoch(tmp_path) == pytest.approx((6 + 2 + 2) / 2)


def test_ratios_are_compared_with_those_of_the_paper() -> None:
    ratios = {"elr_plus": 2.5, "dividemix": 6.5, "sop": 1.0}
    results = {name: Result(ratio, paired_ratio([ratio] * 3, [1.0] * 3)) for name, ratio in ratios.items()}
    assert [verdict.met for verdict in judge(results, judged=True)] == [
        PAPER[n] >= ratios[n] for n in PAPER if n in ratios
    ]
    assert {verdict.met for verdict in judge(results, judged=False)} == {None}


def test_every_method_is_measured() -> None:
    assert set(ALL_METHODS) <= set(METHODS)


def test_a_quick_run_writes_ratios_to_cross_entropy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "methods.json"
    assert main(["bench", "methods", "--quick", "--methods", "elr", "--network", "mlp", "--out", str(out)]) == 0
    found = json.loads(out.read_text())["methods"]
    assert set(found) == {"ce", "elr"}
    assert found["ce"]["ratio"]["median"] == 1
    assert found["elr"]["seconds"] > 0
    assert "is finished" not in capsys.readouterr().out, "the runs themselves print nothing"


def test_an_unknown_method_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "methods", "--methods", "nothing"]) != 0
    assert "--methods nothing: must be one of ce" in capsys.readouterr().err
