"""Asked to stop, a run finishes its step, saves it, and says so; asked again, it changes nothing. One process here: see
tests/e2e/test_preemption.py for several and their launchers."""

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
from sopdist.train.preemption import SIGNALS, STOP, Requests, listening
from sopdist.train.running import run_config
from sopdist.train.together import BAD_CONFIG, OK, PREEMPTED
from tests.e2e.exactness import assert_same_checkpoint, last_step, told_by
from tests.e2e.records import newest_checkpoint
from tests.train.grey_images import write_images

EPOCH = 7  # steps
ENDLESS = "train.epochs=1000"  # long enough to be asked, and short enough to end if nobody listens
SELDOM = "checkpoint.every=0 evaluate.every=100000"
CONFIG = """
data: {root: shards, split: train, recipe: digits, labels: wrong, backend: cpu, threads: 1}
model: {name: mlp}
objective: {visits: 1.5}
optim: {lr: 0.05, schedule: constant}
train: {epochs: 3, batch: 9}
engine: {threads: 1}
evaluate: {splits: {val: val}}
log: {every: 1, wandb: 'off'}
"""

Train = Callable[..., Path]


@pytest.fixture(autouse=True)
def deaf() -> Iterator[None]:
    """A signal that comes when no run is there to note it must not end the tests."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("preemption")
    write_images(folder / "shards" / "train", 61)
    write_images(folder / "shards" / "val", 30)
    (folder / "small.yaml").write_text(CONFIG)
    return folder


@pytest.fixture
def train(place: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """Train in this process; the run's folder."""

    def start(name: str, keys: str = "", *, resume: str = "none", code: int = OK) -> Path:
        monkeypatch.chdir(place)
        assert run_config("small.yaml", [f"run.name={name}", *keys.split()], resume=resume) == code
        return place / "runs" / name

    return start


@contextmanager
def meanwhile(act: Callable[[], bool]) -> Iterator[None]:
    """In another thread, a thousand times a second, until it returns True or the block ends."""
    over = threading.Event()

    def look() -> None:
        while not act() and not over.wait(0.001):
            pass

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        over.set()
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
    """Stopped as asked, with a checkpoint of the last step; which one it was."""
    summary = summary_of(run)
    assert (summary["finished"], summary["exit"]) == (False, "preempted")
    step = step_of(newest_checkpoint(run))
    assert step == summary["steps"] == last_step(run)
    verify_checkpoint(newest_checkpoint(run))
    assert not (run / STOP).exists()
    return step


@pytest.mark.parametrize("how", ["SIGTERM", "SIGUSR1", STOP])
def test_a_run_that_is_asked_to_stop_saves_its_step_and_goes_on_bit_for_bit(
    train: Train, place: Path, how: str
) -> None:
    run = place / "runs" / how
    with meanwhile(lambda: last_step(run) >= EPOCH + 3 and ask(run, how)):
        train(how, f"{ENDLESS} {SELDOM}", code=PREEMPTED)
    step = assert_stopped(run)
    assert summary_of(run)["reason"] == (f"runs/{how}/STOP was found" if how == STOP else f"{how} was received")
    end = f"train.max_steps={step + 5} {ENDLESS} {SELDOM} checkpoint.every=1"
    assert train(how, end, resume="auto") == run
    assert summary_of(run)["finished"] is True
    whole = train(f"whole-{how}", end)
    assert told_by(run) == told_by(whole)
    assert_same_checkpoint(newest_checkpoint(run), newest_checkpoint(whole))


def test_asked_while_it_starts_a_run_stops_after_its_first_step(train: Train) -> None:
    with meanwhile(lambda: is_listening() and send(signal.SIGTERM)):
        run = train("at-the-start", SELDOM, code=PREEMPTED)
    assert assert_stopped(run) == 1


def test_a_file_that_is_there_at_the_start_is_obeyed_after_the_first_step(train: Train, place: Path) -> None:
    run = place / "runs" / "asked-before"
    run.mkdir(parents=True)
    (run / STOP).touch()
    train("asked-before", SELDOM, code=PREEMPTED)
    assert assert_stopped(run) == 1


@pytest.mark.parametrize("how", ["SIGUSR1", STOP])
def test_asked_in_its_last_step_a_run_is_finished(train: Train, place: Path, how: str) -> None:
    run = place / "runs" / f"last-{how}"
    run.mkdir(parents=True)
    with meanwhile(lambda: is_listening() and ask(run, how)):
        train(run.name, "train.max_steps=1")
    assert summary_of(run)["finished"] is True
    assert not (run / STOP).exists()


def test_asked_in_the_last_step_of_an_epoch_a_run_evaluates_saves_and_stops(train: Train, place: Path) -> None:
    """With a batch of everything each step is one."""
    run = place / "runs" / "end-of-epoch"
    with meanwhile(lambda: last_step(run) >= 3 and send(signal.SIGTERM)):
        train("end-of-epoch", f"{ENDLESS} checkpoint.every=0 train.batch=61", code=PREEMPTED)
    step = assert_stopped(run)
    assert [line["step"] for line in told_by(run) if line["kind"] == "eval"] == list(range(1, step + 1))


def test_asked_while_it_evaluates_a_run_stops_after_the_next_step(
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
    assert told_by(run) == told_by(train("whole-evaluating", f"train.max_steps={EPOCH + 5}"))


def test_signals_that_rain_down_on_a_run_while_it_saves_do_no_harm(train: Train, place: Path) -> None:
    run = place / "runs" / "rain"
    sent: list[int] = []

    def rain() -> bool:
        if last_step(run) >= 3:
            for number in SIGNALS:
                sent.append(number)
                send(number)
        return False

    with meanwhile(rain):
        train("rain", f"{ENDLESS} {SELDOM}", code=PREEMPTED)
    assert_stopped(run)
    assert len(sent) > 4
    train("rain", f"train.max_steps=40 {ENDLESS}", resume="auto")


def test_a_stop_whose_save_fails_says_so_and_goes_on_from_the_checkpoint_before(
    train: Train, place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = place / "runs" / "unsaved"

    def get_in_the_way() -> bool:
        if last_step(run) < EPOCH + 2:
            return False
        shutil.move(run / "checkpoints", run / "elsewhere")
        (run / "checkpoints").write_text("in the way")
        return send(signal.SIGTERM)

    with meanwhile(get_in_the_way):
        train("unsaved", f"{ENDLESS} evaluate.every=100000 checkpoint.every=0 checkpoint.steps=5", code=PREEMPTED)
    assert "COULD NOT SAVE" in caplog.text
    summary = summary_of(run)
    assert (summary["exit"], summary["failed_saves"] >= 1) == ("preempted, not saved", True)
    assert summary["saved_step"] < summary["steps"]
    (run / "checkpoints").unlink()
    shutil.move(run / "elsewhere", run / "checkpoints")
    train("unsaved", "train.max_steps=21", resume="auto")


def test_checkpoints_appear_by_steps_and_by_the_clock(train: Train) -> None:
    keys = "checkpoint.every=0 checkpoint.keep=99 train.max_steps=12"
    run = train("by-steps", f"{keys} checkpoint.steps=5")
    assert [step_of(path) for path in complete_checkpoints(run)] == [5, 10]
    run = train("by-the-clock", f"{keys} checkpoint.minutes=1e-9")
    assert [step_of(path) for path in complete_checkpoints(run)] == list(range(1, 13))
    run = train("by-a-slow-clock", f"{keys} checkpoint.minutes=1000")
    assert complete_checkpoints(run) == []


@pytest.mark.parametrize(("keys", "code"), [("train.max_steps=1", OK), ("train.batch=0", BAD_CONFIG)])
def test_afterwards_signals_do_what_they_did_before(train: Train, keys: str, code: int) -> None:
    def mine(*_: object) -> None: ...

    signal.signal(signal.SIGUSR1, mine)
    train(f"handlers-{code}", keys, code=code)
    assert signal.getsignal(signal.SIGUSR1) is mine
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_a_forked_process_does_not_inherit_it() -> None:
    with listening("python") as requests:
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
        assert requests.reason == "SIGUSR1 was received", "the first of them"


@pytest.mark.parametrize(("launcher", "asked"), [("torchrun", 1.0), ("deepspeed", 1.0), ("python", 0.0), ("srun", 0.0)])
def test_who_was_started_by_a_launcher_that_has_gone_is_asked_to_stop(launcher: str, asked: float) -> None:
    """A launcher, forked here, forks a rank and ends; the rank tells through a pipe what it was asked."""
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
    assert reason == ("its launcher has gone" if asked else "")
