"""On a stop request all ranks stop after the same step, save it and report it, no matter which process got the request
and which launcher started them.

Launchers turn exit code 75 of the ranks into various codes. The summary says that the run was preempted.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sopdist.checkpoint import complete_checkpoints, verify_checkpoint
from sopdist.checkpoint.folder import step_of
from sopdist.train.distributed.run_ranks import PREEMPTED
from sopdist.train.distributed.stop_requests import STOP
from tests.e2e.test_lost_ranks import codes_of
from tests.support.breaking import wait_for
from tests.support.exactness import assert_same_run, last_step, train, write_workspace
from tests.support.launchers import Started, start

ENDLESS = (
    "train.epochs=100000", "train.max_steps=0", "evaluate.every=100000", "checkpoint.every=0", "checkpoint.steps=0",
)  # fmt: skip
DEEPSPEED = ("engine.kind=deepspeed",)
TERM, USR1, KILL = signal.SIGTERM, signal.SIGUSR1, signal.SIGKILL


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_workspace(tmp_path_factory.mktemp("preempted"))


def start_run(workspace: Path, name: str, launcher: str, ranks: int, *keys: str, step: int = 3) -> Started:
    """Start a run and wait until it has done this many steps."""
    started = start(launcher, ["--cfg", "small.yaml", f"run.name={name}", *keys], workspace, ranks)
    wait_for(lambda: last_step(workspace / "runs" / name) >= step, started)
    return started


def assert_stopped(run: Path) -> dict[str, Any]:
    """There is one intact checkpoint, of the last logged step. Return the summary."""
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    assert (summary["finished"], summary["exit"]) == (False, "preempted")
    (newest,) = complete_checkpoints(run)
    assert step_of(newest) == summary["steps"] == last_step(run)
    verify_checkpoint(newest)
    assert not (run / STOP).exists()
    return summary


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_signal_to_one_of_two_ranks_stops_both_and_the_run_resumes_bit_for_bit(workspace: Path) -> None:
    run = workspace / "runs" / "one-signalled"
    keys = ("checkpoint.steps=0",)
    started = start_run(workspace, run.name, "srun", 2, *keys)
    os.kill(started.ranks()[1], USR1)
    assert codes_of(started) == [PREEMPTED, PREEMPTED], started.err.read_text()
    assert assert_stopped(run)["reason"] == "rank 1: SIGUSR1 was received"
    train(workspace, "srun", 2, [f"run.name={run.name}", *keys, "--resume", "auto"])
    train(workspace, "srun", 2, ["run.name=uninterrupted", *keys])
    assert_same_run(run, run.with_name("uninterrupted"))


def all_ranks(number: int) -> Callable[[Started], None]:
    def act(started: Started) -> None:
        for pid in started.ranks():
            os.kill(pid, number)

    return act


def rank(which: int, number: int) -> Callable[[Started], None]:
    return lambda started: os.kill(started.ranks()[which], number)


def launcher(number: int) -> Callable[[Started], None]:
    return lambda started: os.kill(started.processes[0].pid, number)


def parent(number: int) -> Callable[[Started], None]:
    """Signal the process that `deepspeed` starts to start the ranks."""
    return lambda started: os.kill(parent_of(started.ranks()[0]), number)


CASES = {
    "python, USR1": ("python", 1, rank(0, USR1), "SIGUSR1 was received", {PREEMPTED}),
    "srun, TERM to all": ("srun", 2, all_ranks(TERM), "SIGTERM was received", {PREEMPTED}),
    "torchrun, USR1 to one": ("torchrun", 2, rank(1, USR1), "rank 1: SIGUSR1 was received", {1}),
    "torchrun, TERM to the launcher, which passes it on": (
        "torchrun", 2, launcher(TERM), "SIGTERM was received", {1, -TERM},
    ),
    "torchrun, KILL to the launcher": ("torchrun", 2, launcher(KILL), "its launcher has exited", {-KILL}),
    "deepspeed, USR1 to one": ("deepspeed", 2, rank(0, USR1), "SIGUSR1 was received", {PREEMPTED, 1}),
    "deepspeed, TERM to its second process, which passes it on": (
        "deepspeed", 2, parent(TERM), "SIGTERM was received", {1},
    ),
    "deepspeed, KILL to its second process": ("deepspeed", 2, parent(KILL), "its launcher has exited", {0, 247}),
    "deepspeed, TERM to the launcher, which does not pass it on": (
        "deepspeed", 2, launcher(TERM), "its launcher has exited", {-TERM},
    ),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_whichever_process_gets_the_signal_all_ranks_stop_after_the_same_step(workspace: Path, case: str) -> None:
    kind, ranks, send_signal, reason, codes = CASES[case]
    run = workspace / "runs" / case.replace(" ", "-").replace(",", "")
    keys = (*ENDLESS, *(DEEPSPEED if kind == "deepspeed" else ()))
    started = start_run(workspace, run.name, kind, ranks, *keys)
    send_signal(started)
    assert set(codes_of(started)) <= codes, started.err.read_text()
    found = assert_stopped(run)["reason"]
    assert found == reason or (found == f"rank 1: {reason}" and "exited" in reason), "either rank may see it first"
    assert f"stopped after step {last_step(run)}: {found}; use --resume auto to resume" in started.err.read_text()


@pytest.mark.long
def test_a_stop_file_stops_all_ranks(workspace: Path) -> None:
    run = workspace / "runs" / "file"
    started = start_run(workspace, run.name, "torchrun", 2, *ENDLESS)
    (run / STOP).touch()
    assert codes_of(started) == [1]
    assert assert_stopped(run)["reason"] == "runs/file/STOP was found"


@pytest.mark.long
def test_repeated_signals_during_a_long_save_do_no_harm(workspace: Path) -> None:
    """A network of 21 million weights, whose checkpoint takes a second or more to write."""
    run = workspace / "runs" / "long-save"
    keys = (*ENDLESS, "model.name=resnet34", "train.batch=4")
    started = start_run(workspace, run.name, "python", 1, *keys, step=2)
    (pid,) = started.ranks()
    signals_during_save = 0
    checkpoints = run / "checkpoints"
    until = time.monotonic() + 120
    while started.processes[0].poll() is None and not list(checkpoints.glob("*/complete")):
        assert time.monotonic() < until
        os.kill(pid, TERM)
        os.kill(pid, USR1)
        signals_during_save += checkpoints.exists()
        time.sleep(0.002)
    assert codes_of(started) == [PREEMPTED], started.err.read_text()
    assert signals_during_save > 20
    assert assert_stopped(run)["reason"] in ("SIGTERM was received", "SIGUSR1 was received")
