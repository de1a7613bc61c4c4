"""A pool of daemon threads for decoding, which never keeps the process from exiting."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import torch

from ...errors import DataError

T = TypeVar("T")

_JOIN_TIMEOUT = 10.0  # seconds that closing waits for a thread, which may be busy with an image or a download


class Task(Generic[T]):
    """A call that runs in one of the threads, and its result. One thread at a time may wait for it.

    Not a `concurrent.futures.Future`: its `result` waits on a `threading.Condition`, where Ctrl-C at the wrong moment
    is lost in a "RuntimeError: cannot release un-acquired lock". `SimpleQueue.get` is safe to interrupt.
    """

    def __init__(self, function: Callable[..., T], *args: Any) -> None:
        self._call: tuple[Callable[..., T], tuple[Any, ...]] | None = (function, args)
        self._value: T
        self._error: BaseException | None = None
        self._done = False
        self._wake: SimpleQueue[None] = SimpleQueue()

    def run(self) -> None:
        """Make the call, unless it was cancelled. Its exception is raised in the thread that waits for the result."""
        call = self._call
        if call is None:
            return
        function, args = call
        try:
            self._value = function(*args)
        except BaseException as error:
            self._error = error
        self._finish()

    def cancel(self) -> None:
        """Do not run the call if it has not started. Waiting for its result raises a `CancelledError`."""
        if not self._done:
            self._error = CancelledError()
            self._finish()

    def done(self) -> bool:
        """Whether `result` returns at once."""
        return self._done

    def result(self) -> T:
        """Wait for the call, and return its result or raise its exception."""
        if not self._done:
            self._wake.get()
        if self._error is not None:
            raise self._error
        return self._value

    def _finish(self) -> None:
        self._call = None  # release the buffers among the arguments
        self._done = True
        self._wake.put(None)


class Workers:
    """Like `concurrent.futures.ThreadPoolExecutor`, but with daemon threads in which torch is single-threaded.

    `ThreadPoolExecutor` makes the interpreter wait at exit until all tasks are done, and a download may never finish.
    With torch's default number of threads, each worker would start its own intra-op threads, all on the same cores.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._process = os.getpid()
        self._tasks: SimpleQueue[Task[Any] | None] = SimpleQueue()
        # Each thread calls set_num_threads(1) for itself. But this also changes the default of threads started later,
        # so start the workers one after the other and then restore the number.
        before = torch.get_num_threads()
        self._threads = [_start(self._tasks, f"{name}-{i}") for i in range(threads)]
        torch.set_num_threads(before)
        self.close = weakref.finalize(self, _stop, self._tasks, self._threads, self._process)  # at exit at the latest

    def submit(self, function: Callable[..., T], *args: Any) -> Task[T]:
        """Run `function(*args)` in one of the threads."""
        if os.getpid() != self._process:
            raise DataError("a stream was opened before a fork; open it in the process that reads from it")
        task = Task(function, *args)
        self._tasks.put(task)
        return task


def _start(tasks: SimpleQueue[Task[Any] | None], name: str) -> threading.Thread:
    ready = threading.Event()
    thread = threading.Thread(target=_run, args=(tasks, ready), name=name, daemon=True)
    thread.start()
    ready.wait()
    return thread


def _run(tasks: SimpleQueue[Task[Any] | None], ready: threading.Event) -> None:
    torch.set_num_threads(1)
    ready.set()
    while (task := tasks.get()) is not None:
        task.run()
        del task  # release its result


def _stop(tasks: SimpleQueue[Task[Any] | None], threads: list[threading.Thread], process: int) -> None:
    if os.getpid() != process:  # a forked child does not have these threads
        return
    while not tasks.empty():
        task = tasks.get()
        if task is not None:
            task.cancel()
    for _ in threads:
        tasks.put(None)
    for thread in threads:
        thread.join(_JOIN_TIMEOUT)
