"""Compare candidates fairly on a shared machine. Independent of what the candidates do.

The machine is not equally fast from one minute to the next. So all candidates take short turns in every round, and the
order is shuffled every round: a slow minute, or a neighbour that evicts the caches, affects all of them equally.
`measure` times the candidates of one process, `take_turns` those that several ranks run together.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from tqdm import tqdm

if TYPE_CHECKING:
    from ..train.distributed.world import World

Name = TypeVar("Name", bound=Hashable)
Turn = TypeVar("Turn")

MIN_CALLS = 3  # of a candidate that is too slow for its budget

_RESAMPLES = 2000


@dataclass(frozen=True)
class Quartiles:
    """The median and the quartiles around it."""

    median: float
    lower: float
    upper: float


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, lower and upper quartile."""
    lower, median, upper = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return median, lower, upper


@dataclass(frozen=True)
class Timing(Quartiles):
    """Seconds per call, over this many calls."""

    calls: int

    def __str__(self) -> str:
        """Milliseconds, for a table."""
        return f"{self.median * 1e3:.3g} [{self.lower * 1e3:.3g}, {self.upper * 1e3:.3g}]"


@dataclass(frozen=True)
class Ratio(Quartiles):
    """Ratios of two turns of the same round, with the 95% confidence interval of their median."""

    median_from: float
    median_to: float
    rounds: int

    def __str__(self) -> str:
        return f"{self.median:.3f} x (95%: {self.median_from:.3f} to {self.median_to:.3f})"


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

    A candidate whose calls would take more than `budget` seconds in total gets fewer calls, spread over the run.
    """
    if repeats < 1 or block < 1 or warmup < 1:
        raise ValueError(f"repeats, block and warmup must be at least 1, got {repeats}, {block} and {warmup}")
    calls = {}
    for name, call in candidates.items():
        fastest = min(_time_calls(call, warmup))
        calls[name] = max(min(MIN_CALLS, repeats), min(repeats, int(budget / max(fastest, 1e-9))))
    rounds = -(-repeats // block)
    seconds: dict[Name, list[float]] = {name: [] for name in candidates}
    order, shuffle = list(candidates), random.Random(0).shuffle
    for number in tqdm(range(1, rounds + 1), desc=title or None, unit="round", leave=False):
        shuffle(order)
        for name in order:
            due = calls[name] * number // rounds - len(seconds[name])
            seconds[name] += _time_calls(candidates[name], due)
    return {name: Timing(*quartiles(values), len(values)) for name, values in seconds.items()}


def _time_calls(call: Callable[[], object], times: int) -> list[float]:
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return seconds


def take_turns(
    world: World, candidates: Mapping[str, Callable[[], Turn]], *, seconds: float, min_rounds: int, title: str
) -> dict[str, list[Turn]]:
    """Run rounds for `seconds`, and return the results of each candidate on this rank, one per round.

    All ranks start each turn together. The first round is a warm-up and does not count.
    """
    found: dict[str, list[Turn]] = {name: [] for name in candidates}
    order, shuffle = list(candidates), random.Random(0).shuffle
    shape = "{desc} {percentage:3.0f}%|{bar:30}|{postfix}"
    with tqdm(total=seconds, desc=title, bar_format=shape, leave=False, disable=world.rank != 0) as bar:
        start = time.perf_counter()
        rounds = -1
        while True:
            shuffle(order)
            for name in order:
                world.barrier()
                turn = candidates[name]()
                if rounds >= 0:
                    found[name].append(turn)
            rounds += 1
            (elapsed,) = world.max([time.perf_counter() - start])  # all ranks must stop after the same round
            bar.set_postfix_str(f"{rounds} rounds", refresh=False)
            bar.update(min(elapsed, seconds) - bar.n)
            if rounds >= min_rounds and elapsed >= seconds:
                return found


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """Divide round by round: a slow round affects both sides."""
    ratios = np.array(numerators) / np.array(denominators)
    # Bootstrap: ratios of times on a busy machine have long tails, so no formula for a normal distribution applies.
    drawn = np.random.default_rng(0).choice(ratios, (_RESAMPLES, len(ratios)))  # (resamples, rounds)
    low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975)).tolist()
    return Ratio(*quartiles(ratios.tolist()), low, high, len(ratios))


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work, so that a clock can be read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
