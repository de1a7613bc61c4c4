"""The run log: what is on disk and on the screen, during a run and afterwards."""

from __future__ import annotations

import csv
import io
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sopdist.train.record.run_folder import METRICS, SUMMARY_CSV, SUMMARY_JSON
from sopdist.train.record.run_log import RunLog, summary_rows
from sopdist.train.settings import LogSettings

OFF = LogSettings(wandb="off")


def make_run_log(folder: Path, steps: int = 10) -> RunLog:
    folder.mkdir(exist_ok=True)
    return RunLog(folder, OFF, {}, steps, "first")


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]


def summary_of(folder: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((folder / SUMMARY_JSON).read_text())
    return summary


def log_epoch(run_log: RunLog, epoch: int, top1: float) -> None:
    """Log an epoch of five steps, its evaluation and its noise metrics."""
    step = 5 * (epoch + 1)
    train = {"loss": 1 / step, "accuracy": top1 - 0.1, "samples_per_second": 1204.4, "data_share": 0.03}
    run_log.log("train", step, epoch, train)
    run_log.log("eval", step, epoch, {"val/top1": top1, "val/top5": 0.99, "best": top1})
    run_log.log("noise", step, epoch, {"rate": 0.4, "auroc": None, "per_class": {"rate": [0.5, 0.3]}})


def test_a_line_says_what_was_measured_where_and_when(tmp_path: Path) -> None:
    run_log = make_run_log(tmp_path)
    run_log.log("train", 5, 0, {"loss": float("nan"), "accuracy": 0.5, "kind": "not this", "step": -1})
    (line,) = lines_of(tmp_path)
    time = line.pop("time")
    assert line == {"kind": "train", "step": 5, "epoch": 0, "loss": None, "accuracy": 0.5}
    assert 1.7e9 < time < 1e11


def test_the_summary_has_a_row_for_each_evaluated_epoch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_log = make_run_log(tmp_path)
    run_log.rewind(0)
    log_epoch(run_log, 0, 0.85)
    log_epoch(run_log, 1, 0.8)
    assert run_log.finish({"steps": 10, "seconds": float("inf")}, finished=True)
    rows = list(csv.DictReader(io.StringIO((tmp_path / SUMMARY_CSV).read_text())))
    assert rows[1] == {
        "epoch": "1", "step": "10", "loss": "0.1", "accuracy": "0.7000000000000001", "samples_per_second": "1204.4",
        "data_share": "0.03", "val/top1": "0.8", "val/top5": "0.99", "eval/best": "0.8",
        "noise/rate": "0.4", "noise/auroc": "",
    }  # fmt: skip
    assert [row["epoch"] for row in rows] == ["0", "1"]
    summary = summary_of(tmp_path)
    assert summary["last"]["val/top1"] == 0.8
    del summary["last"]
    assert summary == {"name": "first", "finished": True, "exit": "finished", "steps": 10, "seconds": None}
    printed = capsys.readouterr()
    assert f"{tmp_path} is finished" in printed.out
    assert "val/top1                          0.8  (best 0.85, epoch 0)" in printed.out
    assert "loss 0.1, accuracy 70.0%, 1,204 samples/s, data 3%" in printed.err
    assert "100%" in printed.err
    assert "10/10" in printed.err


def test_the_summary_of_a_run_that_stopped_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_log = make_run_log(tmp_path)
    assert run_log.finish({"exit": "NonFiniteError: step 3"}, finished=False)
    assert summary_of(tmp_path) == {"name": "first", "finished": False, "exit": "NonFiniteError: step 3"}
    assert (tmp_path / SUMMARY_CSV).read_text() == "epoch,step\n"
    assert not capsys.readouterr().out


def test_a_killed_run_leaves_its_lines_and_a_summary_that_is_not_finished(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\nfrom pathlib import Path\n"
        "from tests.train.record.test_run_log import make_run_log, log_epoch\n"
        "run_log = make_run_log(Path(sys.argv[1]))\nlog_epoch(run_log, 0, 0.9)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, timeout=120)
    assert result.returncode == -signal.SIGKILL
    assert [line["kind"] for line in lines_of(tmp_path)] == ["train", "eval", "noise"]
    assert summary_of(tmp_path) == {"name": "first", "finished": False, "exit": "running"}


def test_a_finished_run_that_is_resumed_is_not_finished_until_it_finishes_again(tmp_path: Path) -> None:
    make_run_log(tmp_path).finish({}, finished=True)
    run_log = make_run_log(tmp_path)
    assert summary_of(tmp_path)["finished"] is False
    run_log.finish({}, finished=True)
    assert summary_of(tmp_path)["finished"] is True


def test_a_resumed_run_has_the_same_files_as_an_uninterrupted_one(tmp_path: Path) -> None:
    uninterrupted = make_run_log(tmp_path / "uninterrupted", 15)
    for epoch in range(3):
        log_epoch(uninterrupted, epoch, 0.7 + epoch / 20)
    uninterrupted.finish({}, finished=True)

    resumed = make_run_log(tmp_path / "resumed", 15)
    log_epoch(resumed, 0, 0.7)
    resumed.log("train", 7, 1, {"loss": 0.3})  # past the checkpoint, and then a crash
    with (tmp_path / "resumed" / METRICS).open("a") as file:
        file.write('{"kind": "eval", "step": 10, "ep')
    resumed = make_run_log(tmp_path / "resumed", 15)
    resumed.rewind(5)
    for epoch in range(1, 3):
        log_epoch(resumed, epoch, 0.7 + epoch / 20)
    resumed.finish({}, finished=True)

    without_time = [
        [{**line, "time": 0} for line in lines_of(tmp_path / name)] for name in ("uninterrupted", "resumed")
    ]
    assert without_time[0] == without_time[1]
    assert (tmp_path / "uninterrupted" / SUMMARY_CSV).read_bytes() == (tmp_path / "resumed" / SUMMARY_CSV).read_bytes()


def test_the_progress_bar_of_a_resumed_run_continues_where_it_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_log = make_run_log(tmp_path, 40)
    run_log.rewind(30)
    for step in range(31, 36):
        run_log.advance(step)
    run_log.finish({}, finished=False)
    shown = capsys.readouterr().err
    assert "30/40" in shown
    assert shown.rstrip().rpartition("\r")[2].startswith("first  88%")
    assert "35/40" in shown


def test_a_summary_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_log = make_run_log(tmp_path)
    log_epoch(run_log, 0, 0.5)
    (tmp_path / SUMMARY_CSV).mkdir()
    with caplog.at_level(logging.WARNING):
        assert not run_log.finish({}, finished=True)
    assert f"{SUMMARY_CSV}: cannot be written: Is a directory" in caplog.text
    assert summary_of(tmp_path)["finished"] is True


def test_a_run_whose_folder_is_deleted_continues(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import shutil

    run_log = make_run_log(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    with caplog.at_level(logging.WARNING):
        log_epoch(run_log, 0, 0.5)
        assert not run_log.finish({}, finished=False)
    assert caplog.text.count(f"{METRICS}: cannot be written") == 1


def test_rows_have_the_latest_training_metrics_and_omit_epochs_without_evaluation() -> None:
    rows = summary_rows(
        [
            {"kind": "train", "step": 1, "epoch": 0, "time": 1.0, "loss": 3.0},
            {"kind": "train", "step": 2, "epoch": 0, "time": 2.0, "loss": 2.0},
            {"kind": "noise", "step": 2, "epoch": 0, "time": 2.0, "rate": 0.1},
            {"kind": "train", "step": 3, "epoch": 1, "time": 3.0, "loss": 1.0},
            {"kind": "eval", "step": 3, "epoch": 1, "time": 3.0, "val/top1": 0.5, "loss": 9.0},
            {"kind": "warning", "step": 3, "epoch": 1, "time": 3.0, "text": "hot"},
        ]
    )
    assert rows == [{"epoch": 1, "step": 3, "loss": 1.0, "val/top1": 0.5, "eval/loss": 9.0}]


def test_of_equally_good_epochs_the_first_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_log = make_run_log(tmp_path)
    log_epoch(run_log, 0, 0.85)
    log_epoch(run_log, 1, 0.85)
    run_log.finish({}, finished=True)
    assert "(best 0.85, epoch 0)" in capsys.readouterr().out
