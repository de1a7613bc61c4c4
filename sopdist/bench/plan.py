"""The plan of an epoch: what it costs, and how well it shuffles."""

from __future__ import annotations

import time
import tracemalloc
from dataclasses import dataclass

import numpy as np

from ..data.plan import training_plan

_SHARD, _BATCH = 1000, 256


@dataclass(frozen=True)
class PlanFigures:
    """Cost and quality. A full shuffle has correlation 0 and `neighbours_if_full`."""

    samples: int
    seconds: float
    peak_bytes: int
    correlation: float  # of a sample's place in the epoch and its index (ranks: both are permutations)
    neighbours: float  # pairs of a batch that come from the same shard, as a share of all pairs
    neighbours_if_full: float

    def __str__(self) -> str:
        return (
            f"plan of {self.samples:,} samples in shards of {_SHARD}: {self.seconds:.2f} s, "
            f"peak {self.peak_bytes / 1e6:.0f} MB; correlation of place and index {self.correlation:+.4f}; "
            f"pairs of a batch from one shard {self.neighbours:.2%} (full shuffle {self.neighbours_if_full:.2%})"
        )


def plan_figures(samples: int) -> PlanFigures:
    """Plan three epochs of that many samples: two for the time, of which the faster counts, one for the memory."""
    firsts = np.append(np.arange(0, samples, _SHARD), samples)
    seconds = []
    for epoch in range(2):
        begun = time.perf_counter()
        plan = training_plan(firsts, 0, epoch, _BATCH)
        seconds.append(time.perf_counter() - begun)
    tracemalloc.start()
    plan = training_plan(firsts, 0, 2, _BATCH)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    rows = plan.rows[:-1].astype(np.int64)  # full ones
    shards = np.sort(rows[:: max(1, len(rows) // 2000)] // _SHARD, axis=1)  # (some rows, batch)
    same = np.array([_equal_pairs(row) for row in shards]).mean()
    return PlanFigures(
        samples=samples,
        seconds=min(seconds),
        peak_bytes=peak,
        correlation=float(np.corrcoef(np.arange(rows.size), rows.reshape(-1))[0, 1]),
        neighbours=float(same / (_BATCH * (_BATCH - 1) / 2)),
        neighbours_if_full=(_SHARD - 1) / (samples - 1),
    )


def _equal_pairs(values: np.ndarray) -> int:
    counts = np.unique(values, return_counts=True)[1]
    return int((counts * (counts - 1) // 2).sum())
