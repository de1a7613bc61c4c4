"""Part 3 of `sopdist bench input`: cost and shuffle quality of the plan of an epoch."""

from __future__ import annotations

import time
import tracemalloc
from dataclasses import dataclass

import numpy as np

from ..cli.units import format_bytes
from ..data.plan import training_plan

_SHARD, _BATCH = 1000, 256


@dataclass(frozen=True)
class PlanFigures:
    """Cost and quality. A full shuffle has correlation 0 and `neighbours_if_full`."""

    samples: int
    seconds: float
    peak_bytes: int
    correlation: float  # of a sample's position in the epoch with its index (rank correlation: both are permutations)
    neighbours: float  # fraction of the sample pairs in a batch that come from the same shard
    neighbours_if_full: float

    def __str__(self) -> str:
        return (
            f"plan of {self.samples:,} samples in shards of {_SHARD}: {self.seconds:.2f} s, "
            f"peak {format_bytes(self.peak_bytes)}; correlation of position and index {self.correlation:+.4f}; "
            f"sample pairs from the same shard {self.neighbours:.2%} (full shuffle {self.neighbours_if_full:.2%})"
        )


def plan_figures(samples: int) -> PlanFigures:
    """Plan three epochs of `samples` samples: two for the time, of which the faster counts, and one for the memory."""
    firsts = np.append(np.arange(0, samples, _SHARD), samples)
    seconds = []
    for epoch in range(2):
        start = time.perf_counter()
        plan = training_plan(firsts, 0, epoch, _BATCH)
        seconds.append(time.perf_counter() - start)
    tracemalloc.start()
    plan = training_plan(firsts, 0, 2, _BATCH)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    rows = plan.batches[:-1].astype(np.int64)  # without the last batch, which may be padded
    shards = np.sort(rows[:: max(1, len(rows) // 2000)] // _SHARD, axis=1)  # (some batches, batch)
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
