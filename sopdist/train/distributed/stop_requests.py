"""Requests to a run while it trains: to stop, or to save a checkpoint because the interval in minutes has passed.

A rank is asked to stop by SIGTERM, by SIGUSR1, by a file STOP in the run's folder, or when its launcher has exited. It
only records the request. The training loop sums the requests over ranks along with other values of each step, so that
all ranks stop after the same step. Further requests change nothing.

Child processes do not inherit the signal handlers.
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
_POLL_INTERVAL = 1.0  # seconds between checks for that file, which may be on a slow drive
_WAITING_LAUNCHERS = ("torchrun", "deepspeed", "accelerate")  # wait for their ranks, unless they are killed
_DEEPSPEED = (b"deepspeed", b"deepspeed.launcher.runner")  # as a program, or as a module


class PreemptedError(Exception):
    """The run was asked to stop, and has saved. Every rank raises it after the same step."""


class Requests:
    """The requests that this rank has received. Created by `listen_for_requests`."""

    def __init__(self, launcher: str) -> None:
        self.reason = ""  # why this rank was asked to stop; empty: it was not
        self._stop_file: Path | None = None
        self._minutes = 0.0
        self._looked = self._saved = time.monotonic()
        self._parent = os.getppid() if launcher in _WAITING_LAUNCHERS else None
        self._runner = _runner_of(os.getppid()) if launcher == "deepspeed" else None

    def watch(self, folder: Path, minutes: float) -> None:
        """On rank 0: look for the file STOP, and request a checkpoint after `minutes` without one; 0: never."""
        self._stop_file, self._minutes = folder / STOP, minutes
        self._saved = time.monotonic()
        self._looked = self._saved - _POLL_INTERVAL  # so that the first step also looks

    def now(self) -> list[float]:
        """Whether to stop, and whether a checkpoint is due: 1 or 0 each. Cheap enough for every step."""
        if was_interrupted():  # but still running: Python dropped the exception
            raise KeyboardInterrupt
        if not self.reason and self._launcher_has_exited():
            self.reason = "its launcher has exited"
        clock = time.monotonic()
        if self._stop_file is not None and not self.reason and clock - self._looked >= _POLL_INTERVAL:
            self._looked = clock
            with suppress(OSError):  # if the drive does not respond now, do not stop
                self._stop_file.stat()
                self.reason = f"{self._stop_file} was found"
        due = 0 < self._minutes * 60 <= clock - self._saved
        return [float(bool(self.reason)), float(due)]

    def _launcher_has_exited(self) -> bool:
        if self._parent is None:
            return False
        return os.getppid() != self._parent or (self._runner is not None and _parent_of(self._parent) != self._runner)

    def saved(self) -> None:
        """Restart the interval in minutes: a checkpoint has been started."""
        self._saved = time.monotonic()

    def acknowledge_stop(self) -> None:
        """Remove the file STOP, so that the next run does not find it."""
        if self._stop_file is not None:
            with suppress(OSError):
                self._stop_file.unlink()

    def note(self, number: int, _: FrameType | None = None) -> None:
        """Signal handler: record the first signal as the reason."""
        self.reason = self.reason or f"{signal.Signals(number).name} was received"


@contextmanager
def listen_for_requests(launcher: str) -> Iterator[Requests]:
    """Record signals inside the block. Only the main thread can receive them; in another one nothing changes."""
    requests = Requests(launcher)
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, requests.note) for number in SIGNALS if main}
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _runner_of(launch: int) -> int | None:
    """The `deepspeed` command that started the process `launch`, which starts the ranks and outlives the command.

    None if another program started it, e.g. srun or ssh: its exit means nothing.
    """
    runner = _parent_of(launch)
    try:
        command = Path(f"/proc/{runner}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return None
    return runner if any(word.rpartition(b"/")[2] in _DEEPSPEED for word in command[:3]) else None


def _parent_of(pid: int | None) -> int | None:
    """None if the process has exited, or on a system without /proc."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def _reset_handlers_in_child() -> None:
    for number in SIGNALS:
        if isinstance(getattr(signal.getsignal(number), "__self__", None), Requests):
            signal.signal(number, signal.SIG_DFL)


os.register_at_fork(after_in_child=_reset_handlers_in_child)
