"""An interrupt that comes where Python drops exceptions is not lost."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator

import pytest

from sopdist.train.interrupts import noting_interrupts, was_interrupted
from sopdist.train.preemption import Requests


@pytest.fixture(autouse=True)
def _usual_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background ignores them
    yield
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def interrupted_generator() -> Iterator[int]:
    try:
        yield 1
    finally:
        interrupt()


def drop_an_interrupt() -> None:
    """As a loop that falls apart does: the generator is closed by the collector, which raises nothing."""
    generator = interrupted_generator()
    next(generator)
    del generator


def test_an_interrupt_is_raised_and_noted() -> None:
    with noting_interrupts():
        assert not was_interrupted()
        with pytest.raises(KeyboardInterrupt):
            interrupt()
        assert was_interrupted()
    with noting_interrupts():
        assert not was_interrupted()


def test_an_interrupt_that_python_drops_ends_the_run_at_the_next_step(capfd: pytest.CaptureFixture[str]) -> None:
    requests = Requests("python")
    with noting_interrupts():
        assert requests.now() == [0.0, 0.0]
        drop_an_interrupt()
        assert was_interrupted()
        with pytest.raises(KeyboardInterrupt):
            requests.now()
    assert "Traceback" not in capfd.readouterr().err


def test_other_exceptions_that_python_drops_are_still_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda dropped: told.append(dropped.exc_type))

    class Bad:
        def __del__(self) -> None:
            raise ValueError

    with noting_interrupts():
        Bad()
        drop_an_interrupt()
    assert told == [ValueError]


def test_handlers_are_left_as_they_were() -> None:
    complain = sys.unraisablehook
    with noting_interrupts():
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert sys.unraisablehook is complain


def test_interrupts_that_somebody_else_handles_are_left_to_them() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with noting_interrupts():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        interrupt()
    assert not was_interrupted()
