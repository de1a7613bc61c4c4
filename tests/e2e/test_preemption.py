"""Asked to stop, all ranks stop after the same step, save it and say so, whoever was asked and whatever launched them.

What a launcher makes of the ranks' code 75 is its own; that a run goes on later, its summary says.
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
from sopdist.train.preemption import STOP
from sopdist.train.together import PREEMPTED
from tests.e2e.breaking import wait_for
from tests.e2e.exactness import assert_same_run, last_step, train, write_place
from tests.e2e.launchers import Started, start
from tests.e2e.test_lost_ranks import codes_of

ENDLESS = (
    "train.epochs=100000", "train.max_steps=0", "evaluate.every=100000", "checkpoint.every=0", "checkpoint.steps=0",
)  # fmt: skip
DEEPSPEED = ("engine.kind=deepspeed",)
TERM, USR1, KILL = signal.SIGTERM, signal.SIGUSR1, signal.SIGKILL


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_place(tmp_path_factory.mktemp("preempted"))


def begin(place: Path, name: str, launcher: str, ranks: int, *keys: str, step: int = 3) -> Started:
    """A run that has done so many steps."""
    started = start(launcher, ["--cfg", "small.yaml", f"run.name={name}", *keys], place, ranks)
    wait_for(lambda: last_step(place / "runs" / name) >= step, started)
    return started


def assert_stopped(run: Path) -> dict[str, Any]:
    """There is one checkpoint, of the last step that was told, whole and of all ranks; the summary."""
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    assert (summary["finished"], summary["exit"]) == (False, "preempted")
    (newest,) = complete_checkpoints(run)
    assert step_of(newest) == summary["steps"] == last_step(run)
    verify_checkpoint(newest)
    assert not (run / STOP).exists()
    return summary


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_one_of_two_ranks_is_asked_both_stop_and_the_run_goes_on_bit_for_bit(place: Path) -> None:
    run = place / "runs" / "one-asked"
    keys = ("checkpoint.steps=0",)
    started = begin(place, run.name, "srun", 2, *keys)
    os.kill(started.ranks()[1], USR1)
    assert codes_of(started) == [PREEMPTED, PREEMPTED], started.err.read_text()
    assert assert_stopped(run)["reason"] == "rank 1: SIGUSR1 was received"
    train(place, "srun", 2, [f"run.name={run.name}", *keys, "--resume", "auto"])
    train(place, "srun", 2, ["run.name=never-asked", *keys])
    assert_same_run(run, run.with_name("never-asked"))


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
    """Of `deepspeed`, which starts a process that starts the ranks: that one."""
    return lambda started: os.kill(parent_of(started.ranks()[0]), number)


ASKED = {
    "python, USR1": ("python", 1, rank(0, USR1), "SIGUSR1 was received", {PREEMPTED}),
    "srun, TERM to all": ("srun", 2, all_ranks(TERM), "SIGTERM was received", {PREEMPTED}),
    "torchrun, USR1 to one": ("torchrun", 2, rank(1, USR1), "rank 1: SIGUSR1 was received", {1}),
    "torchrun, TERM to the launcher, which passes it on": (
        "torchrun", 2, launcher(TERM), "SIGTERM was received", {1, -TERM},
    ),
    "torchrun, KILL to the launcher": ("torchrun", 2, launcher(KILL), "its launcher has gone", {-KILL}),
    "deepspeed, USR1 to one": ("deepspeed", 2, rank(0, USR1), "SIGUSR1 was received", {PREEMPTED, 1}),
    "deepspeed, TERM to its second process, which passes it on": (
        "deepspeed", 2, parent(TERM), "SIGTERM was received", {1},
    ),
    "deepspeed, KILL to its second process": ("deepspeed", 2, parent(KILL), "its launcher has gone", {0, 247}),
    "deepspeed, TERM to the launcher, which does not pass it on": (
        "deepspeed", 2, launcher(TERM), "its launcher has gone", {-TERM},
    ),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("case", ASKED)
def test_whoever_is_asked_all_ranks_stop_after_the_same_step(place: Path, case: str) -> None:
    kind, ranks, ask, reason, codes = ASKED[case]
    run = place / "runs" / case.replace(" ", "-").replace(",", "")
    keys = (*ENDLESS, *(DEEPSPEED if kind == "deepspeed" else ()))
    started = begin(place, run.name, kind, ranks, *keys)
    ask(started)
    assert set(codes_of(started)) <= codes, started.err.read_text()
    told = assert_stopped(run)["reason"]
    assert told == reason or (told == f"rank 1: {reason}" and "gone" in reason), "either rank may see it first"
    assert f"stopped after step {last_step(run)}: {told}; --resume auto goes on" in started.err.read_text()


@pytest.mark.long
def test_a_file_stop_stops_all_ranks(place: Path) -> None:
    run = place / "runs" / "file"
    started = begin(place, run.name, "torchrun", 2, *ENDLESS)
    (run / STOP).touch()
    assert codes_of(started) == [1]
    assert assert_stopped(run)["reason"] == "runs/file/STOP was found"


@pytest.mark.long
def test_signals_all_through_a_long_save_do_no_harm(place: Path) -> None:
    """A network of 21 million weights, whose checkpoint takes a second or more to write."""
    run = place / "runs" / "long-save"
    keys = (*ENDLESS, "model.name=resnet34", "train.batch=4")
    started = begin(place, run.name, "python", 1, *keys, step=2)
    (pid,) = started.ranks()
    while_it_saves = 0
    checkpoints = run / "checkpoints"
    until = time.monotonic() + 120
    while started.processes[0].poll() is None and not list(checkpoints.glob("*/complete")):
        assert time.monotonic() < until
        os.kill(pid, TERM)
        os.kill(pid, USR1)
        while_it_saves += checkpoints.exists()
        time.sleep(0.002)
    assert codes_of(started) == [PREEMPTED], started.err.read_text()
    assert while_it_saves > 20
    assert assert_stopped(run)["reason"] in ("SIGTERM was received", "SIGUSR1 was received")
