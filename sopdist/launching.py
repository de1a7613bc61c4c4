"""Start a training command as a child process: its environment, the end of its log, and no process left behind.

Independent of what is trained, and of who starts it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .train.distributed.launch_env import LAUNCH_VARIABLES


def launch_environ() -> dict[str, str]:
    """The environment of a launcher: without a rank of this process, and with the programs of this Python first."""
    environ = {name: value for name, value in os.environ.items() if name not in LAUNCH_VARIABLES}
    environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environ.get('PATH', os.defpath)}"
    return environ


def end_of_log(log: Path, lines: int = 30) -> str:
    """The last lines of a log, indented."""
    return "\n".join(f"  {line}" for line in log.read_text(errors="replace").splitlines()[-lines:])


def kill_tree(launcher: subprocess.Popen[Any]) -> None:
    """Kill a launcher and all of its descendants. A signal to the launcher alone may leave ranks running."""
    groups = set()
    for pid in (launcher.pid, *descendants(launcher.pid)):
        with suppress(ProcessLookupError):
            groups.add(os.getpgid(pid))  # torchrun starts each rank in its own session
    for group in groups - {os.getpgrp()}:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    launcher.wait()


def descendants(pid: int) -> list[int]:
    """All descendants of a process; none on systems without /proc, where only the launcher's own group is killed."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = stat.read_text(errors="replace").rpartition(")")[2].split()[1]
            children.setdefault(int(parent), []).append(int(stat.parent.name))
    found, pending = list[int](), [pid]
    while pending:
        below = children.get(pending.pop(), [])
        found += below
        pending += below
    return found


@contextmanager
def stop_on_signals() -> Iterator[None]:
    """Treat SIGTERM and SIGHUP (`kill`, `timeout`, closed terminal) like Ctrl-C, so that no rank outlives it."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
