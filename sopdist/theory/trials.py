"""Independent pieces of work on several processes, with one bar; the results do not depend on how many processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import numpy as np
from threadpoolctl import threadpool_limits

from ..data.commands.output import progress_bar
from .problem import ProblemError

Task = TypeVar("Task")
Result = TypeVar("Result")


def generator_of(seed: int, *place: int) -> np.random.Generator:
    """The random numbers of one trial: a function of the seed and of where it stands, not of who draws before."""
    return np.random.default_rng([seed, *place])


def work_off(
    work: Callable[[Task], Result], tasks: Sequence[Task], jobs: int, *, title: str, unit: str
) -> list[Result]:
    """`work` of each task, in their order, on `jobs` processes. It must be a function of a module, or a partial of one.

    Tasks that take long should come first: the last ones decide how long the other processes wait.
    """
    found: list[Result] = []
    with progress_bar(total=len(tasks), desc=title, unit=unit) as bar:
        for result in _results(work, tasks, min(jobs, len(tasks))):
            found.append(result)
            bar.update()
    return found


def _results(work: Callable[[Task], Result], tasks: Sequence[Task], jobs: int) -> Iterable[Result]:
    alone = partial(_work_alone, work)
    if jobs <= 1:
        yield from map(alone, tasks)
        return
    with _pool(jobs) as pool:
        with _without_interrupts():  # processes that are started now inherit it: Ctrl-C is for this one alone
            waiting: list[Future[Result]] = [pool.submit(alone, task) for task in tasks]
        try:
            for future in waiting:
                yield future.result()
        except BrokenProcessPool:
            raise ProblemError("a process was killed, perhaps for want of memory; fewer --jobs need less") from None


@contextmanager
def _pool(jobs: int) -> Iterator[ProcessPoolExecutor]:
    # Fresh processes: a fork would copy threads of libraries by half.
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initializer=_end_with_parent)
    try:
        yield pool
    except BaseException:
        for process in list(pool._processes.values()):  # an interrupt does not wait for what is under way
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _end_with_parent() -> None:
    """A process that starts others may be killed, and these would wait for work for ever."""

    def wait() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _work_alone(work: Callable[[Task], Result], task: Task) -> Result:
    with threadpool_limits(1):  # the processes are the parallelism; here, where all libraries are loaded
        return work(task)


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """One that comes is held back until the end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
