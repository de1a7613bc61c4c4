"""When asked to stop, a run finishes its step, saves and reports it; further requests change nothing.

One process here; tests/e2e/test_preemption.py starts several with their launchers.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sopdist.checkpoint import complete_checkpoints, verify_checkpoint
from sopdist.checkpoint.folder import step_of
from sopdist.train import epoch_end
from sopdist.train.distributed.run_ranks import BAD_CONFIG, OK, PREEMPTED
from sopdist.train.distributed.stop_requests import SIGNALS, STOP, Requests, listen_for_requests
from sopdist.train.run import run_config
from tests.support.exactness import assert_same_checkpoint, deterministic_metrics, last_step
from tests.support.grey_images import write_images
from tests.support.records import newest_checkpoint

EPOCH = 7  # steps
ENDLESS = "train.epochs=1000"  # long enough to be asked to stop, short enough to finish if the request is missed
RARELY = "checkpoint.every=0 evaluate.every=100000"
CONFIG = """
data: {root: shards, split: train, recipe: digits, labels: wrong, backend: cpu, threads: 1}
model: {name: mlp}
method: {visits: 1.5}
optim: {lr: 0.05, schedule: constant}
train: {epochs: 3, batch: 9}
engine: {threads: 1}
evaluate: {splits: {val: val}}
log: {every: 1, wandb: 'off'}
"""

Train = Callable[..., Path]


@pytest.fixture(autouse=True)
def ignore_signals() -> Iterator[None]:
    """A signal that arrives while no run listens must not kill the tests."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("preemption")
    write_images(path / "shards" / "train", 61)
    write_images(path / "shards" / "val", 30)
    (path / "small.yaml").write_text(CONFIG)
    return path


@pytest.fixture
def train(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """Train in this process and return the run folder."""

    def start(name: str, keys: str = "", *, resume: str = "none", code: int = OK) -> Path:
        monkeypatch.chdir(folder)
        assert run_config("small.yaml", [f"run.name={name}", *keys.split()], resume=resume) == code
        return folder / "runs" / name

    return start


@contextmanager
def meanwhile(act: Callable[[], bool]) -> Iterator[None]:
    """Call `act` in another thread, a thousand times a second, until it returns True or the block ends."""
    done = threading.Event()

    def look() -> None:
        while not act() and not done.wait(0.001):
            pass

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def send(number: signal.Signals) -> bool:
    os.kill(os.getpid(), number)
    return True


def ask(run: Path, how: str) -> bool:
    if how == STOP:
        (run / STOP).touch()
        return True
    return send(signal.Signals[how])


def is_listening() -> bool:
    return signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN


def summary_of(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return found


def assert_stopped(run: Path) -> int:
    """The run stopped as asked, with a checkpoint of its last step; returns that step."""
    summary = summary_of(run)
    assert (summary["finished"], summary["exit"]) == (False, "preempted")
    step = step_of(newest_checkpoint(run))
    assert step == summary["steps"] == last_step(run)
    verify_checkpoint(newest_checkpoint(run))
    assert not (run / STOP).exists()
    return step


@pytest.mark.parametrize("how", ["SIGTERM", "SIGUSR1", STOP])
def test_a_run_that_is_asked_to_stop_saves_its_step_and_resumes_bit_for_bit(
    train: Train, folder: Path, how: str
) -> None:
    run = folder / "runs" / how
    with meanwhile(lambda: last_step(run) >= EPOCH + 3 and ask(run, how)):
        train(how, f"{ENDLESS} {RARELY}", code=PREEMPTED)
    step = assert_stopped(run)
    assert summary_of(run)["reason"] == (f"runs/{how}/STOP was found" if how == STOP else f"{how} was received")
    end = f"train.max_steps={step + 5} {ENDLESS} {RARELY} checkpoint.every=1"
    assert train(how, end, resume="auto") == run
    assert summary_of(run)["finished"] is True
    uninterrupted = train(f"uninterrupted-{how}", end)
    assert deterministic_metrics(run) == deterministic_metrics(uninterrupted)
    assert_same_checkpoint(newest_checkpoint(run), newest_checkpoint(uninterrupted))


def test_a_run_that_is_asked_during_startup_stops_after_its_first_step(train: Train) -> None:
    with meanwhile(lambda: is_listening() and send(signal.SIGTERM)):
        run = train("at-the-start", RARELY, code=PREEMPTED)
    assert assert_stopped(run) == 1


def test_a_stop_file_that_exists_at_the_start_takes_effect_after_the_first_step(train: Train, folder: Path) -> None:
    run = folder / "runs" / "asked-before"
    run.mkdir(parents=True)
    (run / STOP).touch()
    train("asked-before", RARELY, code=PREEMPTED)
    assert assert_stopped(run) == 1


@pytest.mark.parametrize("how", ["SIGUSR1", STOP])
def test_a_run_that_is_asked_in_its_last_step_is_finished(train: Train, folder: Path, how: str) -> None:
    run = folder / "runs" / f"last-{how}"
    run.mkdir(parents=True)
    with meanwhile(lambda: is_listening() and ask(run, how)):
        train(run.name, "train.max_steps=1")
    assert summary_of(run)["finished"] is True
    assert not (run / STOP).exists()


def test_a_run_that_is_asked_in_the_last_step_of_an_epoch_evaluates_saves_and_stops(train: Train, folder: Path) -> None:
    """With all samples in one batch, every step is the last one of an epoch."""
    run = folder / "runs" / "end-of-epoch"
    with meanwhile(lambda: last_step(run) >= 3 and send(signal.SIGTERM)):
        train("end-of-epoch", f"{ENDLESS} checkpoint.every=0 train.batch=61", code=PREEMPTED)
    step = assert_stopped(run)
    assert [line["step"] for line in deterministic_metrics(run) if line["kind"] == "eval"] == list(range(1, step + 1))


def test_a_run_that_is_asked_during_an_evaluation_stops_after_the_next_step(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate = epoch_end.evaluate

    def interrupted(*args: Any) -> dict[str, float]:
        send(signal.SIGTERM)
        found: dict[str, float] = evaluate(*args)
        return found

    monkeypatch.setattr(epoch_end, "evaluate", interrupted)
    run = train("evaluating", "checkpoint.every=0", code=PREEMPTED)
    assert assert_stopped(run) == EPOCH + 1
    monkeypatch.setattr(epoch_end, "evaluate", evaluate)
    train("evaluating", f"train.max_steps={EPOCH + 5}", resume="auto")
    assert deterministic_metrics(run) == deterministic_metrics(
        train("uninterrupted-evaluating", f"train.max_steps={EPOCH + 5}")
    )


def test_many_signals_while_a_run_saves_do_no_harm(train: Train, folder: Path) -> None:
    run = folder / "runs" / "signals"
    sent: list[int] = []

    def send_all() -> bool:
        if last_step(run) >= 3:
            for number in SIGNALS:
                sent.append(number)
                send(number)
        return False

    with meanwhile(send_all):
        train("signals", f"{ENDLESS} {RARELY}", code=PREEMPTED)
    assert_stopped(run)
    assert len(sent) > 4
    train("signals", f"train.max_steps=40 {ENDLESS}", resume="auto")


def test_a_stop_whose_save_fails_is_reported_and_resumes_from_the_previous_checkpoint(
    train: Train, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = folder / "runs" / "unsaved"

    def block_checkpoints() -> bool:
        if last_step(run) < EPOCH + 2:
            return False
        shutil.move(run / "checkpoints", run / "elsewhere")
        (run / "checkpoints").write_text("in the way")
        return send(signal.SIGTERM)

    with meanwhile(block_checkpoints):
        train("unsaved", f"{ENDLESS} evaluate.every=100000 checkpoint.every=0 checkpoint.steps=5", code=PREEMPTED)
    assert "checkpoint could not be saved" in caplog.text
    summary = summary_of(run)
    assert (summary["exit"], summary["failed_saves"] >= 1) == ("preempted, not saved", True)
    assert summary["saved_step"] < summary["steps"]
    (run / "checkpoints").unlink()
    shutil.move(run / "elsewhere", run / "checkpoints")
    train("unsaved", "train.max_steps=21", resume="auto")


def test_checkpoints_are_saved_every_n_steps_and_every_n_minutes(train: Train) -> None:
    keys = "checkpoint.every=0 checkpoint.keep=99 train.max_steps=12"
    run = train("by-steps", f"{keys} checkpoint.steps=5")
    assert [step_of(path) for path in complete_checkpoints(run)] == [5, 10]
    run = train("by-minutes", f"{keys} checkpoint.minutes=1e-9")
    assert [step_of(path) for path in complete_checkpoints(run)] == list(range(1, 13))
    run = train("by-many-minutes", f"{keys} checkpoint.minutes=1000")
    assert complete_checkpoints(run) == []


@pytest.mark.parametrize(("keys", "code"), [("train.max_steps=1", OK), ("train.batch=0", BAD_CONFIG)])
def test_signal_handlers_are_restored_afterwards(train: Train, keys: str, code: int) -> None:
    def mine(*_: object) -> None: ...

    signal.signal(signal.SIGUSR1, mine)
    train(f"handlers-{code}", keys, code=code)
    assert signal.getsignal(signal.SIGUSR1) is mine
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_a_forked_process_does_not_inherit_the_handlers() -> None:
    with listen_for_requests("python") as requests:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            os.write(writing, b"!")
            signal.pause()
            os._exit(0)
        assert os.read(reading, 1) == b"!"
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        assert requests.now() == [0.0, 0.0]
        send(signal.SIGUSR1)
        send(signal.SIGTERM)
        assert requests.now() == [1.0, 0.0]
        assert requests.reason == "SIGUSR1 was received", "the first signal"


@pytest.mark.parametrize(("launcher", "asked"), [("torchrun", 1.0), ("deepspeed", 1.0), ("python", 0.0), ("srun", 0.0)])
def test_a_rank_whose_launcher_has_exited_is_asked_to_stop(launcher: str, asked: float) -> None:
    """A launcher, forked here, forks a rank and exits; the rank writes its requests to a pipe."""
    reading, writing = os.pipe()
    launching = os.fork()
    if launching == 0:
        signal.alarm(60)
        ready, made = os.pipe()
        if os.fork() == 0:
            parent, requests = os.getppid(), Requests(launcher)
            before = requests.now()
            os.write(made, b"!")
            while os.getppid() == parent:
                time.sleep(0.01)
            os.write(writing, json.dumps([before, requests.now(), requests.reason]).encode())
            os._exit(0)
        os.read(ready, 1)
        os._exit(0)
    os.close(writing)
    assert os.waitpid(launching, 0)[1] == 0
    with open(reading, "rb") as pipe:
        before, now, reason = json.loads(pipe.read())
    assert (before, now) == ([0.0, 0.0], [asked, 0.0])
    assert reason == ("its launcher has exited" if asked else "")
