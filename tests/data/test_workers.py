"""The pool of decoding threads: results, exceptions, cancellation, and interrupts while waiting."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from types import FrameType
from typing import Any

import pytest

from sopdist.data.decode.workers import Workers


@pytest.fixture
def workers() -> Iterator[Workers]:
    pool = Workers(2, "test")
    yield pool
    pool.close()


def test_a_task_returns_its_result_as_often_as_asked(workers: Workers) -> None:
    task = workers.submit(pow, 3, 4)
    assert [task.result(), task.result()] == [81, 81]
    assert task.done()


def test_an_exception_is_raised_where_the_result_is_awaited(workers: Workers) -> None:
    with pytest.raises(ZeroDivisionError):
        workers.submit(divmod, 1, 0).result()
    assert workers.submit(pow, 2, 2).result() == 4, "the thread survives"


def test_a_cancelled_task_never_runs(workers: Workers) -> None:
    release = threading.Event()
    ran: list[int] = []
    busy = [workers.submit(release.wait) for _ in range(2)]
    task = workers.submit(ran.append, 1)
    task.cancel()
    release.set()
    for other in busy:
        other.result()
    with pytest.raises(CancelledError):
        task.result()
    assert workers.submit(len, ran).result() == 0


def test_an_interrupt_at_any_line_of_waiting_is_a_keyboard_interrupt(workers: Workers) -> None:
    """The interrupt is raised at the first line of Python that waiting runs, then at the second, and so on."""
    for line in range(1000):
        release = threading.Event()
        task = workers.submit(release.wait)
        threading.Timer(0.01, release.set).start()
        if not _interrupted_at(line, task.result):
            assert line > 2, "result() itself has a few lines"
            return
        assert task.result() is True, "the task can still be awaited"
    raise AssertionError("waiting never got through")


def _interrupted_at(line: int, call: Callable[[], object]) -> bool:
    """Call, with a KeyboardInterrupt at the given line event. False if the call ends before it."""
    lines = 0

    def trace(_frame: FrameType, event: str, _arg: object) -> Any:
        nonlocal lines
        if event == "line":
            lines += 1
            if lines > line:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False
