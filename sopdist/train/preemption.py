"""What others ask of a run while it trains: to stop and make room, or, by the clock, a checkpoint.

Asked to stop is who gets SIGTERM or SIGUSR1, whose run's folder has a file STOP, or whose launcher has gone. A rank
only notes that it was asked; it tells the others with what all ranks sum in each step anyway, so that all of them stop
after the same step. Being asked again changes nothing.

Processes that a rank starts do not inherit this: what they are sent does to them what it always did.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from .interrupts import was_interrupted

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
STOP = "STOP"  # the file in a run's folder that asks the run to stop
_LOOK_EVERY = 1.0  # seconds between looks for that file, which may be on a slow drive
_ENDS_WITH_ITS_RANKS = ("torchrun", "deepspeed", "accelerate")
_DEEPSPEED = (b"deepspeed", b"deepspeed.launcher.runner")  # as a program, or as a module


class PreemptedError(Exception):
    """The run was asked to stop, and has. All ranks raise it after the same step."""


class Requests:
    """What this rank was asked. Made by `listening`."""

    def __init__(self, launcher: str) -> None:
        self.reason = ""  # why this rank wants to stop; empty: it does not
        self._stop_file: Path | None = None
        self._minutes = 0.0
        self._looked = self._saved = time.monotonic()
        self._parent = os.getppid() if launcher in _ENDS_WITH_ITS_RANKS else None
        self._runner = _runner_of(os.getppid()) if launcher == "deepspeed" else None

    def watch(self, folder: Path, minutes: float) -> None:
        """For rank 0: look for the file STOP, and ask for a checkpoint after so many minutes without one; 0: never."""
        self._stop_file, self._minutes = folder / STOP, minutes
        self._saved = time.monotonic()
        self._looked = self._saved - _LOOK_EVERY  # the first step looks, too

    def now(self) -> list[float]:
        """Whether to stop, and whether a checkpoint is due: 1 or 0 each. For every step, so cheap."""
        if was_interrupted():  # and goes on all the same: Python has dropped it
            raise KeyboardInterrupt
        if not self.reason and self._launcher_has_gone():
            self.reason = "its launcher has gone"
        clock = time.monotonic()
        if self._stop_file is not None and not self.reason and clock - self._looked >= _LOOK_EVERY:
            self._looked = clock
            with suppress(OSError):  # a drive that does not answer now is no reason to end a run
                self._stop_file.stat()
                self.reason = f"{self._stop_file} was found"
        due = 0 < self._minutes * 60 <= clock - self._saved
        return [float(bool(self.reason)), float(due)]

    def _launcher_has_gone(self) -> bool:
        if self._parent is None:
            return False
        return os.getppid() != self._parent or (self._runner is not None and _parent_of(self._parent) != self._runner)

    def saved(self) -> None:
        """A checkpoint has been begun."""
        self._saved = time.monotonic()

    def obeyed(self) -> None:
        """The run has ended: nobody shall find the file STOP again."""
        if self._stop_file is not None:
            with suppress(OSError):
                self._stop_file.unlink()

    def note(self, number: int, _: FrameType | None = None) -> None:
        """A signal has come."""
        self.reason = self.reason or f"{signal.Signals(number).name} was received"


@contextmanager
def listening(launcher: str) -> Iterator[Requests]:
    """Note signals from now on. Only the main thread can get them: in another, signals do what they did."""
    requests = Requests(launcher)
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, requests.note) for number in SIGNALS if main}
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _runner_of(launch: int) -> int | None:
    """The process `deepspeed` that has started the one that starts ranks, which does not end with it. None: another
    program has, e.g. srun or ssh, whose end means nothing."""
    runner = _parent_of(launch)
    try:
        command = Path(f"/proc/{runner}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return None
    return runner if any(word.rpartition(b"/")[2] in _DEEPSPEED for word in command[:3]) else None


def _parent_of(pid: int | None) -> int | None:
    """None if it has gone, or if this system does not tell."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def _as_usual_in_children() -> None:
    for number in SIGNALS:
        if isinstance(getattr(signal.getsignal(number), "__self__", None), Requests):
            signal.signal(number, signal.SIG_DFL)


os.register_at_fork(after_in_child=_as_usual_in_children)
