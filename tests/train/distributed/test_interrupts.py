"""An interrupt that arrives where Python drops exceptions is not lost."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator

import pytest

from sopdist.train.distributed.interrupts import note_interrupts, was_interrupted
from sopdist.train.distributed.stop_requests import Requests


@pytest.fixture(autouse=True)
def _default_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background ignore SIGINT
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
    """As when a loop unwinds: the garbage collector closes the generator, and its exceptions are dropped."""
    generator = interrupted_generator()
    next(generator)
    del generator


def test_an_interrupt_is_raised_and_recorded() -> None:
    with note_interrupts():
        assert not was_interrupted()
        with pytest.raises(KeyboardInterrupt):
            interrupt()
        assert was_interrupted()
    with note_interrupts():
        assert not was_interrupted()


def test_an_interrupt_that_python_drops_stops_the_run_at_the_next_step(capfd: pytest.CaptureFixture[str]) -> None:
    requests = Requests("python")
    with note_interrupts():
        assert requests.now() == [0.0, 0.0]
        drop_an_interrupt()
        assert was_interrupted()
        with pytest.raises(KeyboardInterrupt):
            requests.now()
    assert "Traceback" not in capfd.readouterr().err


def test_other_exceptions_that_python_drops_are_still_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda dropped: reported.append(dropped.exc_type))

    class Bad:
        def __del__(self) -> None:
            raise ValueError

    with note_interrupts():
        Bad()
        drop_an_interrupt()
    assert reported == [ValueError]


def test_handlers_are_restored() -> None:
    hook = sys.unraisablehook
    with note_interrupts():
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert sys.unraisablehook is hook


def test_another_handler_of_interrupts_is_left_alone() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with note_interrupts():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        interrupt()
    assert not was_interrupted()
