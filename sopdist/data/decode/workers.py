"""Threads that decode. They end with the process, whatever they are doing, and never keep it from ending."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from ..errors import DataError

T = TypeVar("T")

_Task = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]]
_PATIENCE = 10.0  # seconds that closing waits for a thread, which may be in the middle of an image or a download


class Workers:
    """A pool like concurrent.futures', but of daemon threads, in each of which torch computes alone.

    `ThreadPoolExecutor` makes the interpreter wait at its end until all work is done, and a download may take for
    ever. And with torch's usual number of threads, each of ours would get helpers of its own for every operation, all
    on the same cores.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._process = os.getpid()
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        # A thread's number is set in that thread; but with it, torch also changes what threads to come will get. So
        # they start one after the other, and then the number is put back.
        before = torch.get_num_threads()
        self._threads = [_start(self._tasks, f"{name}-{number}") for number in range(threads)]
        torch.set_num_threads(before)
        self.close = weakref.finalize(self, _stop, self._tasks, self._threads, self._process)  # at exit at the latest

    def submit(self, work: Callable[..., T], *args: Any) -> Future[T]:
        """Let a thread call `work(*args)`."""
        if os.getpid() != self._process:
            raise DataError("a stream was opened before a fork; open it in the process that reads from it")
        future: Future[T] = Future()
        self._tasks.put((future, work, args))
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
        future, work, args = task
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work(*args))
            except BaseException as error:  # whoever waits for the result gets it
                future.set_exception(error)
        del task, future, work, args  # buffers among them are free again


def _stop(tasks: SimpleQueue[_Task | None], threads: list[threading.Thread], process: int) -> None:
    if os.getpid() != process:  # in a forked child there are no such threads
        return
    while not tasks.empty():
        task = tasks.get()
        if task is not None:
            task[0].cancel()
    for _ in threads:
        tasks.put(None)
    for thread in threads:
        thread.join(_PATIENCE)
