"""Candidates that several ranks measure together take turns, and two of them are compared round by round.

On a shared machine the speed of one minute is not that of the next. Every round all candidates have a short turn, in an
order that is shuffled anew, and a ratio is one of two turns of the same round: a slow minute hits both alike.

Knows nothing of what a turn does.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from tqdm import tqdm

from ..train.world import World

Turn = TypeVar("Turn")

_RESAMPLES = 2000


def take_turns(
    world: World, candidates: Mapping[str, Callable[[], Turn]], *, seconds: float, fewest: int, title: str
) -> dict[str, list[Turn]]:
    """What each candidate's turns returned on this rank, round by round, of as many rounds as fit into `seconds`.

    All ranks begin each turn together. A first round is not counted: it prepares memory and kernels.
    """
    found: dict[str, list[Turn]] = {name: [] for name in candidates}
    order, shuffle = list(candidates), random.Random(0).shuffle
    shape = "{desc} {percentage:3.0f}%|{bar:30}|{postfix}"
    with tqdm(total=seconds, desc=title, bar_format=shape, leave=False, disable=world.rank != 0) as bar:
        begun = time.perf_counter()
        rounds = -1
        while True:
            shuffle(order)
            for name in order:
                world.barrier()
                turn = candidates[name]()
                if rounds >= 0:
                    found[name].append(turn)
            rounds += 1
            (passed,) = world.max([time.perf_counter() - begun])  # all ranks must stop after the same round
            bar.set_postfix_str(f"{rounds} rounds", refresh=False)
            bar.update(min(passed, seconds) - bar.n)
            if rounds >= fewest and passed >= seconds:
                return found


@dataclass(frozen=True)
class Ratio:
    """Ratios of turns of the same round: the median, the quartiles, and where 95 of 100 such medians would lie."""

    median: float
    lower: float
    upper: float
    median_from: float
    median_to: float
    rounds: int

    def __str__(self) -> str:
        return f"{self.median:.3f} x (95%: {self.median_from:.3f} to {self.median_to:.3f})"


def paired_ratio(over: Sequence[float], under: Sequence[float]) -> Ratio:
    """`over` through `under`, round by round."""
    ratios = np.array(over) / np.array(under)
    lower, median, upper = np.quantile(ratios, (0.25, 0.5, 0.75)).tolist()
    # By resampling: ratios of times on a busy machine have long tails, so no formula for a normal distribution.
    drawn = np.random.default_rng(0).choice(ratios, (_RESAMPLES, len(ratios)))  # (resamples, rounds)
    low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975)).tolist()
    return Ratio(median, lower, upper, low, high, len(ratios))
