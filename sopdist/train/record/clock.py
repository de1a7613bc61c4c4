"""Time spent in each part of a run. Every moment belongs to exactly one part.

Time outside all parts is `compute`. Evaluation is timed too, but does not count towards the time of the steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Literal, TypeVar, get_args

Part = Literal["data", "exchange", "checkpoint", "evaluate"]
Item = TypeVar("Item")


class Clock:
    """Seconds per part since the last lap. Parts may be nested: time belongs to the innermost part.

    For example:

        clock = Clock()
        with clock.part("data"): ...        # 2 s
        ...                                 # 7 s
        with clock.part("evaluate"): ...    # 5 s
        clock.add("exchange", 1.0)          # of the 7 s, as measured elsewhere
        clock.lap()                         # data 2, exchange 1, checkpoint 0, compute 6, evaluate 5, total 9
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._open: list[str] = []  # the current parts, innermost last
        self._seconds = dict.fromkeys((*get_args(Part), "compute"), 0.0)
        self._mark = now()  # time up to here is already assigned to a part

    @contextmanager
    def part(self, name: Part) -> Iterator[None]:
        """Assign the time of the body to this part."""
        self._assign()
        self._open.append(name)
        try:
            yield
        finally:
            self._assign()
            self._open.pop()

    def timed(self, name: Part, items: Iterable[Item]) -> Iterator[Item]:
        """Yield the items, and assign the time spent waiting for them to this part."""
        iterator = iter(items)
        try:
            while True:
                with self.part(name):
                    try:
                        item = next(iterator)
                    except StopIteration:
                        return
                yield item
        finally:
            close = getattr(iterator, "close", None)
            if close is not None:  # also if the loop stops early
                close()

    def add(self, name: Part, seconds: float) -> None:
        """Move this many seconds of the current lap from `compute` to this part."""
        self._seconds[name] += seconds
        self._seconds["compute"] -= seconds

    def lap(self) -> dict[str, float]:
        """Start a new lap. Return the seconds of each part in the last one, of `compute` (the rest), and `total`.

        `total` is the time of the steps, without evaluation: samples/s are computed from it.
        """
        self._assign()
        lap = {name: max(seconds, 0.0) for name, seconds in self._seconds.items()}
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        return lap | {"total": sum(seconds for name, seconds in lap.items() if name != "evaluate")}

    def _assign(self) -> None:
        """Assign the time since the last mark to the current part."""
        now = self._now()
        self._seconds[self._open[-1] if self._open else "compute"] += now - self._mark
        self._mark = now
