"""Ctrl-C stops a run at once, and reliably.

Python raises KeyboardInterrupt wherever the main thread happens to be. While a generator is closed or an object is
deleted, Python drops the exception. This is not rare: a rank that waits for another one handles its own interrupt only
when the other is gone and its own loop unwinds. Interrupts are therefore recorded as well, for code that has to find
out why a rank stopped.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130  # exit code, as in shells

_interrupted = threading.Event()


def was_interrupted() -> bool:
    """Whether an interrupt has arrived since `note_interrupts` was entered."""
    return _interrupted.is_set()


@contextmanager
def note_interrupts() -> Iterator[None]:
    """Record interrupts inside the block, in the main thread and only if SIGINT has Python's default handler."""
    _interrupted.clear()
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    previous_hook = sys.unraisablehook
    sys.unraisablehook = lambda dropped: None if dropped.exc_type is KeyboardInterrupt else previous_hook(dropped)
    signal.signal(signal.SIGINT, _note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.unraisablehook = previous_hook


def _note(number: int, frame: FrameType | None) -> None:
    _interrupted.set()
    signal.default_int_handler(number, frame)
