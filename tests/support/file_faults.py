"""Inject faults into file operations: the n-th one in a folder kills the process, is torn in half, or fails.

    faults = inject(folder, kind="kill", at=17)      # the 17th, counted from 1
    faults.operations                                # ["mkdir checkpoints", "open metrics.jsonl", ...]

Counts Python's file operations: open for writing, write, fsync, rename, remove, mkdir, truncate. Use it only in a
process that ends afterwards, because nothing is restored. It is independent of the content of files.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

KILL, TORN = "kill", "torn"  # any other kind is the name of an error, e.g. ENOSPC
_BY_PATH = ("mkdir", "rmdir", "unlink", "remove", "replace", "rename", "truncate", "open")
_BY_DESCRIPTOR = ("fsync", "ftruncate")


class Faults:
    """Counts the operations in a folder and applies the fault to `count` of them, starting with the n-th."""

    def __init__(self, folder: Path, kind: str, at: int, count: int) -> None:
        self.operations: list[str] = []
        self._folder, self._kind, self._which = str(folder), kind, range(at, at + count if at else 0)
        self._lock = threading.Lock()  # saves run in their own thread

    def check(self, operation: str, path: str, tear: Callable[[], None] | None = None) -> None:
        """Call this before an operation. `tear` does half of it."""
        if not path.startswith(self._folder):
            return
        with self._lock:
            self.operations.append(f"{operation} {path.removeprefix(self._folder).lstrip('/')}")
            if len(self.operations) not in self._which:
                return
            if tear is not None and self._kind != KILL:
                tear()
            if self._kind in (KILL, TORN):
                os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(60)
        number = getattr(errno, self._kind)
        raise OSError(number, os.strerror(number), path)


def inject(folder: Path, kind: str = KILL, at: int = 0, count: int = 1) -> Faults:
    """Inject faults from now on. `at=0` only counts operations."""
    faults = Faults(folder.resolve(), kind, at, count)
    for name in _BY_PATH:
        setattr(os, name, _by_path(faults, name, getattr(os, name)))
    for name in _BY_DESCRIPTOR:
        setattr(os, name, _by_descriptor(faults, name, getattr(os, name)))
    opener = _opener(faults, io.open)
    io.open = builtins.open = opener
    return faults


class _File:
    """A file that is open for writing and counts its writes."""

    def __init__(self, file: Any, path: str, faults: Faults) -> None:
        self._file, self._path, self._faults = file, path, faults

    def write(self, content: Any) -> int:
        def tear() -> None:
            self._file.write(content[: len(content) // 2])
            self._file.flush()

        self._faults.check("write", self._path, tear)
        return int(self._file.write(content))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __iter__(self) -> Any:
        return iter(self._file)


def _by_path(faults: Faults, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> Any:
        if isinstance(path, str | os.PathLike):
            faults.check(name, _absolute(os.fspath(path), dir_fd))
        if dir_fd is not None:
            kwargs["dir_fd"] = dir_fd
        return original(path, *args, **kwargs)

    return call


def _by_descriptor(faults: Faults, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(descriptor: int, *args: Any) -> Any:
        faults.check(name, os.readlink(f"/proc/self/fd/{descriptor}"))
        return original(descriptor, *args)

    return call


def _opener(faults: Faults, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if not isinstance(path, str | os.PathLike) or not set(mode) & set("wax+"):
            return original(path, mode, *args, **kwargs)
        absolute = _absolute(os.fspath(path), None)
        faults.check("open", absolute)
        return _File(original(path, mode, *args, **kwargs), absolute, faults)

    return call


def _absolute(path: str, dir_fd: int | None) -> str:
    """The absolute path, without following symbolic links."""
    base = os.getcwd() if dir_fd is None else os.readlink(f"/proc/self/fd/{dir_fd}")
    return os.path.normpath(os.path.join(base, path))
