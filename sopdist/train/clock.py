"""Where the time of a run goes: every moment belongs to exactly one part. It knows seconds, not what they are spent on.

What is in no part is `compute`. Evaluation is timed, too, but is no part of the time of the steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Literal, TypeVar, get_args

Part = Literal["data", "exchange", "checkpoint", "evaluate"]
Item = TypeVar("Item")


class Clock:
    """Seconds by part since the last lap. Parts may be nested: the inner one counts.

    For example:

        clock = Clock()
        with clock.part("data"): ...        # 2 s
        ...                                 # 7 s
        with clock.part("evaluate"): ...    # 5 s
        clock.add("exchange", 1.0)          # of the 7 s, as somebody else has measured
        clock.lap()                         # data 2, exchange 1, checkpoint 0, compute 6, evaluate 5, total 9
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._open: list[str] = []  # the parts that we are in, the innermost last
        self._seconds = dict.fromkeys((*get_args(Part), "compute"), 0.0)
        self._mark = now()  # until when the time has been given to a part

    @contextmanager
    def part(self, name: Part) -> Iterator[None]:
        """The time of the body belongs to this part."""
        self._settle()
        self._open.append(name)
        try:
            yield
        finally:
            self._settle()
            self._open.pop()

    def timed(self, name: Part, items: Iterable[Item]) -> Iterator[Item]:
        """The same items; the time that they are waited for belongs to this part."""
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
            if close is not None:  # a loop that ends early must not leave it running
                close()

    def add(self, name: Part, seconds: float) -> None:
        """So many of the seconds since the last lap that were in no part belong to this one."""
        self._seconds[name] += seconds
        self._seconds["compute"] -= seconds

    def lap(self) -> dict[str, float]:
        """Seconds of each part since the last lap, of `compute`, which is the rest, and in `total`.

        `total` is the time of the steps, evaluation excluded: what samples per second are counted in.
        """
        self._settle()
        lap = {name: max(seconds, 0.0) for name, seconds in self._seconds.items()}
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        return lap | {"total": sum(seconds for name, seconds in lap.items() if name != "evaluate")}

    def _settle(self) -> None:
        """Give the time since the last mark to the part that we are in."""
        now = self._now()
        self._seconds[self._open[-1] if self._open else "compute"] += now - self._mark
        self._mark = now
