"""A pool of daemon threads for decoding, which never keeps the process from exiting."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from ...errors import DataError

T = TypeVar("T")

_Task = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]]
_JOIN_TIMEOUT = 10.0  # seconds that closing waits for a thread, which may be busy with an image or a download


class Workers:
    """Like `concurrent.futures.ThreadPoolExecutor`, but with daemon threads in which torch is single-threaded.

    `ThreadPoolExecutor` makes the interpreter wait at exit until all tasks are done, and a download may never finish.
    With torch's default number of threads, each worker would start its own intra-op threads, all on the same cores.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._process = os.getpid()
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        # Each thread calls set_num_threads(1) for itself. But this also changes the default of threads started later,
        # so start the workers one after the other and then restore the number.
        before = torch.get_num_threads()
        self._threads = [_start(self._tasks, f"{name}-{i}") for i in range(threads)]
        torch.set_num_threads(before)
        self.close = weakref.finalize(self, _stop, self._tasks, self._threads, self._process)  # at exit at the latest

    def submit(self, function: Callable[..., T], *args: Any) -> Future[T]:
        """Run `function(*args)` in one of the threads."""
        if os.getpid() != self._process:
            raise DataError("a stream was opened before a fork; open it in the process that reads from it")
        future: Future[T] = Future()
        self._tasks.put((future, function, args))
        return future


def _start(tasks: SimpleQueue[_Task | None], name: str) -> threading.Thread:
    ready = threading.Event()
    thread = threading.Thread(target=_run, args=(tasks, ready), name=name, daemon=True)
    thread.start()
    ready.wait()
    return thread


def _run(tasks: SimpleQueue[_Task | None], ready: threading.Event) -> None:
    torch.set_num_threads(1)
    ready.set()
    while (task := tasks.get()) is not None:
        future, function, args = task
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function(*args))
            except BaseException as error:  # raised in the thread that waits for the result
                future.set_exception(error)
        del task, future, function, args  # release the buffers among them


def _stop(tasks: SimpleQueue[_Task | None], threads: list[threading.Thread], process: int) -> None:
    if os.getpid() != process:  # a forked child does not have these threads
        return
    while not tasks.empty():
        task = tasks.get()
        if task is not None:
            task[0].cancel()
    for _ in threads:
        tasks.put(None)
    for thread in threads:
        thread.join(_JOIN_TIMEOUT)
