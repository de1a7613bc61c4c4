"""If one rank is killed or fails, all ranks exit within a minute: with a message that names the rank and the reason,
with an exit code that is not 0, and without leaving a process behind."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from sopdist.checkpoint.folder import is_complete
from sopdist.train.distributed.watchdog import LOST
from tests.support.breaking import RUN, arguments, damage_image, has_lines, summary_of, wait_for
from tests.support.launchers import Started, start

ENDLESS = ("train.epochs=100000", "log.every=1", "checkpoint.every=0", "evaluate.every=100000")
UNSUPERVISED = "srun"  # ranks without a launcher that watches them
KILLED = -signal.SIGKILL
SOON = 60.0  # seconds


def codes_of(started: Started, timeout: float = SOON) -> list[int]:
    """Wait for the exit codes; raise AssertionError on a timeout, or if processes are left behind."""
    until = time.monotonic() + timeout
    try:
        codes = [process.wait(max(0.1, until - time.monotonic())) for process in started.processes]
        while started.living() and time.monotonic() < until:  # a launcher may exit a moment before its ranks
            time.sleep(0.1)
        left = started.living()
    except subprocess.TimeoutExpired:
        raise AssertionError(f"did not end within {timeout} s:\n{started.err.read_text()}") from None
    finally:
        started.kill()
    assert not left, "processes are left"
    return codes


def kill_in_training(launcher: str, kind: str, victim: int, digits: Path, folder: Path) -> tuple[Started, int]:
    started = start(launcher, arguments(digits, folder, *ENDLESS, kind=kind), folder)
    wait_for(lambda: has_lines(folder, "train"), started)
    pid = started.ranks()[victim]
    os.kill(pid, signal.SIGKILL)
    return started, pid


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_rank_killed_while_training_ends_the_other_ranks_without_a_launcher(
    digits: Path, tmp_path: Path, victim: int
) -> None:
    started, pid = kill_in_training(UNSUPERVISED, "ddp", victim, digits, tmp_path)
    codes = codes_of(started)
    assert codes == [KILLED if rank == victim else LOST for rank in range(2)]
    stderr = started.err.read_text()
    assert stderr.count(f"rank {victim} (pid {pid} on ") == 1
    assert stderr.count("has died: stopping the job") == 1
    assert "Traceback" not in stderr
    assert summary_of(tmp_path)["finished"] is False
    if victim == 1:  # rank 0 writes the summary
        assert summary_of(tmp_path)["exit"] in ("another rank was lost", "running")


@pytest.mark.long
@pytest.mark.parametrize(("launcher", "victim"), [("torchrun", 0), ("deepspeed", 1)])
def test_a_rank_killed_while_training_ends_the_launcher(
    digits: Path, tmp_path: Path, launcher: str, victim: int
) -> None:
    kind = "deepspeed" if launcher == "deepspeed" else "ddp"
    started, pid = kill_in_training(launcher, kind, victim, digits, tmp_path)
    assert codes_of(started) != [0]
    output = started.err.read_text() + started.out.read_text()
    by_launcher = rf"exitcode *: -9 \(pid: {pid}\)|--local_rank={victim}\b.* exits with return code = -9"
    assert f"rank {victim} (pid {pid} on " in output or re.search(by_launcher, output), output
    assert summary_of(tmp_path)["finished"] is False


@pytest.mark.long
def test_a_rank_killed_while_evaluating_ends_the_other_ranks(digits: Path, tmp_path: Path) -> None:
    # One step, then hundreds of small evaluation batches.
    often = ("train.batch=1438", "evaluate.batch=2", "evaluate.every=1")
    started = start(UNSUPERVISED, arguments(digits, tmp_path, *ENDLESS, *often), tmp_path)
    wait_for(lambda: has_lines(tmp_path, "eval", 2), started)
    wait_for(lambda: has_lines(tmp_path, "train", 3), started)
    os.kill(started.ranks()[1], signal.SIGKILL)
    assert codes_of(started) == [LOST, KILLED]
    assert "rank 1 (pid " in started.err.read_text()


@pytest.mark.long
def test_a_rank_killed_while_a_checkpoint_is_written_leaves_the_previous_one(digits: Path, tmp_path: Path) -> None:
    often = (*ENDLESS, "train.batch=1438", "checkpoint.every=1")
    started = start(UNSUPERVISED, arguments(digits, tmp_path, *often), tmp_path)
    checkpoints = tmp_path / RUN / "checkpoints"
    wait_for(lambda: has_lines(tmp_path, "train", 3), started)
    pid = started.ranks()[1]
    wait_for(lambda: any(not is_complete(path) for path in checkpoints.glob("step-*")), started)
    os.kill(pid, signal.SIGKILL)
    assert sorted(codes_of(started)) == sorted([LOST, KILLED])
    shorter = arguments(digits, tmp_path, *often, "train.max_steps=60", "--resume", "auto")
    resumed = start(UNSUPERVISED, shorter, tmp_path)
    assert codes_of(resumed, 150) == [0, 0], resumed.err.read_text()
    assert "resuming from" in resumed.err.read_text()
    assert summary_of(tmp_path)["finished"] is True


@pytest.mark.long
@pytest.mark.parametrize(("launcher", "split"), [(UNSUPERVISED, "test"), ("torchrun", "train"), ("deepspeed", "train")])
def test_a_rank_that_fails_alone_reports_the_reason_and_the_other_ranks_end(
    digits: Path, tmp_path: Path, launcher: str, split: str
) -> None:
    """One unreadable sample where none is allowed: only the rank that reads it fails."""
    damaged = tmp_path / "digits"
    shutil.copytree(digits, damaged)
    damage_image(damaged / split, 17)
    kind = "deepspeed" if launcher == "deepspeed" else "ddp"
    given = arguments(damaged, tmp_path, "data.max_bad_fraction=0", "train.epochs=2", kind=kind)
    started = start(launcher, given, tmp_path)
    codes = codes_of(started, 150)
    stderr = started.err.read_text()
    named = [line for line in stderr.splitlines() if "1 samples could not be read in epoch 0" in line]
    assert len(named) == 1, stderr
    assert "sopdist: rank " in named[0]
    assert f"{damaged / split}" in named[0]
    assert "shard-000000.tar" in stderr
    assert "sopdist/train" not in stderr, "a traceback of sopdist"
    if launcher == UNSUPERVISED:
        assert sorted(codes) == [1, LOST]
    else:
        assert 0 not in codes
    assert summary_of(tmp_path)["finished"] is False


@pytest.mark.long
def test_an_interrupt_ends_all_ranks_at_once_and_is_in_the_summary(digits: Path, tmp_path: Path) -> None:
    started = start(UNSUPERVISED, arguments(digits, tmp_path, *ENDLESS), tmp_path)
    wait_for(lambda: has_lines(tmp_path, "train"), started)
    for process in started.processes:  # each leads its own process group here; a terminal would have one for all
        os.killpg(process.pid, signal.SIGINT)
    assert codes_of(started, 20) == [130, 130]
    stderr = started.err.read_text()
    assert stderr.count("sopdist: interrupted") == 1
    assert "Traceback" not in stderr
    summary = summary_of(tmp_path)
    assert (summary["finished"], summary["exit"]) == (False, "interrupted")


@pytest.mark.long
def test_an_interrupt_is_reported_even_if_another_rank_was_lost_before(digits: Path, tmp_path: Path) -> None:
    """While it waits for another rank, Python handles an interrupt only after the wait has failed."""
    started = start(UNSUPERVISED, arguments(digits, tmp_path, *ENDLESS), tmp_path)
    wait_for(lambda: has_lines(tmp_path, "train"), started)
    first, second = started.ranks()
    os.kill(first, signal.SIGSTOP)
    os.kill(second, signal.SIGKILL)
    started.processes[1].wait(SOON)
    os.kill(first, signal.SIGINT)
    os.kill(first, signal.SIGCONT)
    assert codes_of(started, 20) == [130, KILLED]
    stderr = started.err.read_text()
    assert stderr.count("sopdist: interrupted") == 1
    assert "Traceback" not in stderr
    assert summary_of(tmp_path)["exit"] == "interrupted"


@pytest.mark.long
def test_a_rank_that_hangs_is_given_up_after_the_timeout(digits: Path, tmp_path: Path) -> None:
    started = start(UNSUPERVISED, arguments(digits, tmp_path, *ENDLESS, "engine.timeout=5"), tmp_path)
    wait_for(lambda: has_lines(tmp_path, "train"), started)
    stopped = started.ranks()[1]
    os.kill(stopped, signal.SIGSTOP)
    try:
        assert started.processes[0].wait(SOON) == LOST
        os.kill(stopped, signal.SIGCONT)  # it finds that the other rank is gone
        assert started.processes[1].wait(SOON) == LOST
    finally:
        started.kill()
    assert "rank 0: lost contact with another rank" in started.err.read_text()
