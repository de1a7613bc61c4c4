"""A disk that is full at the start is an error; one that fills up during training costs checkpoints, not the run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data.test_prepare_again import can_mount
from tests.support.breaking import RUN, arguments
from tests.support.launchers import SCRIPT

pytestmark = pytest.mark.skipif(not can_mount(), reason="needs user namespaces to mount a small file system")
EPOCHS = 40  # of one step


def train_on_a_small_disk(
    digits: Path, folder: Path, size: str, *more: str, meanwhile: str = ""
) -> subprocess.CompletedProcess[str]:
    """Train on a new file system of this size and copy it to `folder / "kept"`. `meanwhile` is shell code."""
    disk = folder / "disk"
    disk.mkdir()
    script = (
        f'mount -t tmpfs -o size={size} tmpfs "$0" || exit 99; {meanwhile}\n"$@"; code=$?; cp -r "$0" kept; exit $code'
    )
    train = [sys.executable, str(SCRIPT), *arguments(digits, disk, *more, kind="auto")]
    command = ["unshare", "-rm", "sh", "-c", script, str(disk), *train]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=150)


def test_a_disk_that_is_full_at_the_start_is_an_error(digits: Path, tmp_path: Path) -> None:
    ended = train_on_a_small_disk(digits, tmp_path, "8m")
    assert ended.returncode == 1
    assert f"{RUN}: the disk is full (8.00 MiB free); free some space, or choose another folder" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not [path for path in (tmp_path / "kept").rglob("*") if path.is_file()]


@pytest.mark.long
def test_a_disk_that_fills_up_costs_checkpoints_but_not_the_run(digits: Path, tmp_path: Path) -> None:
    more = (f"train.epochs={EPOCHS}", "train.batch=1438", "checkpoint.keep=1000", "log.every=1")
    # When no checkpoint fits any more, there is still space for the network alone.
    ended = train_on_a_small_disk(digits, tmp_path, "21200k", *more)
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    run = tmp_path / "kept" / RUN
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["finished"], summary["steps"]) == (True, EPOCHS)
    failed = summary["failed_saves"]
    assert ended.stderr.count("checkpoint could not be saved; training continues: ") == failed > 0
    assert f"{RUN}: {failed} saves failed" in ended.stderr
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines() if "train" in line]
    assert steps == list(range(1, EPOCHS + 1)), "no line is missing"
    assert not list(run.rglob("*.part")) + list(run.rglob("*.partial"))
    newest = max((run / "checkpoints").iterdir())
    assert 0 < int(newest.name.removeprefix("step-")) < EPOCHS
    _resumes(digits, tmp_path, newest, *more)


def _resumes(digits: Path, folder: Path, checkpoint: Path, *more: str) -> None:
    """Another run resumes from the last good checkpoint."""
    there = arguments(digits, folder / "again", *more, "checkpoint.keep=1", "--resume", str(checkpoint), kind="auto")
    ended = subprocess.run([sys.executable, str(SCRIPT), *there], capture_output=True, text=True, timeout=150)
    assert ended.returncode == 0, ended.stderr
    assert f"resuming from {checkpoint}" in ended.stderr


@pytest.mark.long
def test_a_run_whose_summary_cannot_be_written_does_not_exit_with_0(digits: Path, tmp_path: Path) -> None:
    """Another process fills the disk once training has started."""
    metrics = f'"$0"/{RUN}/metrics.jsonl'
    fill = f'(until [ -s {metrics} ]; do sleep 0.1; done; cat /dev/zero >"$0"/filler) 2>/dev/null &'
    more = (f"train.epochs={EPOCHS}", "train.batch=1438", "log.every=1", "evaluate.every=1000")
    ended = train_on_a_small_disk(digits, tmp_path, "20m", *more, meanwhile=fill)
    assert ended.returncode == 1, ended.stderr
    assert "metrics.jsonl: cannot be written: No space left on device; the run continues and will retry" in ended.stderr
    assert "summary.json: cannot be written: No space left on device" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert json.loads((tmp_path / "kept" / RUN / "summary.json").read_text())["exit"] == "running"
