"""Timing several candidates in one run, and writing down what came out. Knows nothing of what it times.

On a shared machine the speed of one minute is not that of the next. So the candidates take turns in short blocks, in an
order that is shuffled every round: a slow minute, or a neighbour that empties the caches, hits all of them alike.
"""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

import torch
from tqdm import tqdm

import sopdist

Name = TypeVar("Name", bound=Hashable)

FEWEST_CALLS = 3  # of a candidate too slow for its budget


@dataclass(frozen=True)
class Timing:
    """Seconds a call: the median and the quartiles around it, over so many calls."""

    median: float
    lower: float
    upper: float
    calls: int

    def __str__(self) -> str:
        """Milliseconds, for a table."""
        return f"{self.median * 1e3:.3g} [{self.lower * 1e3:.3g}, {self.upper * 1e3:.3g}]"


def measure(
    candidates: Mapping[Name, Callable[[], object]],
    repeats: int,
    *,
    block: int = 5,
    warmup: int = 3,
    budget: float = 10.0,
    title: str = "",
) -> dict[Name, Timing]:
    """Time every candidate `repeats` times, in turns of `block` calls.

    One whose calls would take more than `budget` seconds in all gets fewer of them, spread over the whole run.
    """
    if repeats < 1 or block < 1 or warmup < 1:
        raise ValueError(f"repeats, block and warmup must be at least 1, got {repeats}, {block} and {warmup}")
    calls = {}
    for name, call in candidates.items():
        fastest = min(_time_calls(call, warmup))
        calls[name] = max(min(FEWEST_CALLS, repeats), min(repeats, int(budget / max(fastest, 1e-9))))
    rounds = -(-repeats // block)
    seconds: dict[Name, list[float]] = {name: [] for name in candidates}
    shuffle = random.Random(0).shuffle
    order = list(candidates)
    for number in tqdm(range(1, rounds + 1), desc=title or None, unit="round", leave=False):
        shuffle(order)
        for name in order:
            due = calls[name] * number // rounds - len(seconds[name])
            seconds[name] += _time_calls(candidates[name], due)
    return {name: _summarise(values) for name, values in seconds.items()}


def _time_calls(call: Callable[[], object], times: int) -> list[float]:
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return seconds


def _summarise(seconds: list[float]) -> Timing:
    few = len(seconds) < 2  # then there is nothing to interpolate
    lower, median, upper = seconds * 3 if few else statistics.quantiles(seconds, n=4, method="inclusive")
    return Timing(median, lower, upper, len(seconds))


def environment() -> dict[str, Any]:
    """What a reader must know of the run to judge its numbers; to be asked before the run puts load on the machine."""
    return {
        "sopdist": sopdist.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def load_warning(header: Mapping[str, Any]) -> str:
    """One line if others kept the machine busy when the run began, else nothing."""
    load, cores = header["load"], header["cpu_count"]
    if load < 0.5 * cores:
        return ""
    return f"the machine was busy at the start (load {load} on {cores} cores): the numbers will be noisy"


def write_json(path: Path, results: Mapping[str, Any], header: Mapping[str, Any] | None = None) -> None:
    """Write the results below the environment they were measured in: the given one, or as it is now."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"environment": header or environment(), **results}, indent=2) + "\n")
