"""Ctrl-C ends a run at once, and for certain.

Python raises KeyboardInterrupt wherever the main thread happens to be. If that is the end of a generator or of an
object, it is dropped. That is not rare: a rank that waits for another one gets to its own interrupt only when the other
has gone and its own loop falls apart. So interrupts are noted as well, and whoever has to decide why a rank ends, asks
here.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130  # exit code, as shells have it

_noted = threading.Event()


def was_interrupted() -> bool:
    """Whether an interrupt has come since `noting_interrupts`."""
    return _noted.is_set()


@contextmanager
def noting_interrupts() -> Iterator[None]:
    """Note interrupts from now on. Only the main thread can get them, and only if nobody else handles them."""
    _noted.clear()
    here = threading.current_thread() is threading.main_thread()
    if not here or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    complain = sys.unraisablehook
    sys.unraisablehook = lambda dropped: None if dropped.exc_type is KeyboardInterrupt else complain(dropped)
    signal.signal(signal.SIGINT, _note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.unraisablehook = complain


def _note(number: int, frame: FrameType | None) -> None:
    _noted.set()
    signal.default_int_handler(number, frame)
