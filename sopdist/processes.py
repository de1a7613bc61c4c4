"""Run independent tasks on several processes. The results do not depend on the number of processes."""

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

from threadpoolctl import threadpool_limits

from .cli.output import progress_bar
from .errors import DataError

Task = TypeVar("Task")
Result = TypeVar("Result")


def run_tasks(
    work: Callable[[Task], Result], tasks: Sequence[Task], jobs: int, *, title: str, unit: str
) -> list[Result]:
    """Call `work` for each task on `jobs` processes; results are in the order of the tasks.

    `work` must be a function of a module, or a partial of one. Put slow tasks first: processes without a task wait for
    the last one.
    """
    results: list[Result] = []
    with progress_bar(total=len(tasks), desc=title, unit=unit) as bar:
        for result in results_of(work, tasks, jobs):
            results.append(result)
            bar.update()
    return results


def results_of(work: Callable[[Task], Result], tasks: Sequence[Task], jobs: int) -> Iterable[Result]:
    """The same, one result at a time, as soon as it and all before it are there."""
    jobs = min(jobs, len(tasks))
    single_threaded = partial(_run_single_threaded, work)
    if jobs <= 1:
        yield from map(single_threaded, tasks)
        return
    with _pool(jobs) as pool:
        with _block_interrupts():  # inherited by the processes that start here: only this process handles Ctrl-C
            futures: list[Future[Result]] = [pool.submit(single_threaded, task) for task in tasks]
        try:
            for future in futures:
                yield future.result()
        except BrokenProcessPool:
            raise DataError("a process was killed, perhaps out of memory; try fewer --jobs") from None


@contextmanager
def _pool(jobs: int) -> Iterator[ProcessPoolExecutor]:
    # Spawned processes: a fork would copy the locks of libraries, but not their threads.
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initializer=_exit_with_parent)
    try:
        yield pool
    except BaseException:
        for process in list(pool._processes.values()):  # an interrupt does not wait for running tasks
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _exit_with_parent() -> None:
    """Exit when the parent process is killed. Without this, a worker would wait for tasks forever."""

    def wait() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _run_single_threaded(work: Callable[[Task], Result], task: Task) -> Result:
    with threadpool_limits(1):  # the processes are the parallelism; set here, after all libraries are loaded
        return work(task)


@contextmanager
def _block_interrupts() -> Iterator[None]:
    """Hold back SIGINT until the end of the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
