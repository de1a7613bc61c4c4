"""The names of tensors in a checkpoint, by section. Each section has one owner in `train/saving/sections.py`.

network/NAME                      weights and buffers
optimizer/NAME/KEY                optimizer state of a weight
statistics/RANK/NAME              running batch statistics, which differ between ranks
last_finite_statistics/NAME       batch statistics as they were when they were last averaged over ranks
average/NAME                      moving average of the weights (train.ema)
statistics/RANK/average/NAME      moving average of the batch statistics
method/NAME                       replicated state of the method
tables/TABLE/RANK/COLUMN          a rank's rows of a sample table
step_metrics/RANK                 sums of a rank that are not yet in metrics.jsonl
"""

from __future__ import annotations

import re

NETWORK, OPTIMIZER, LAST_FINITE, METHOD = "network/", "optimizer/", "last_finite_statistics/", "method/"
AVERAGE = "average/"
STATISTICS, TABLES, STEP_METRICS = "statistics/", "tables/", "step_metrics/"
REPLICATED = (NETWORK, OPTIMIZER, LAST_FINITE, AVERAGE, METHOD)  # independent of the number of ranks
PER_RANK = (STATISTICS, TABLES, STEP_METRICS)

_RANK = re.compile(r"(?:statistics|tables/[a-z0-9_-]+)/([0-9]{1,6})/.+|step_metrics/([0-9]{1,6})", re.DOTALL)

# Names of the sections in format 2, which had only the noise table.
FORMAT_2 = {"noise/": f"{TABLES}noise/", "sound/": LAST_FINITE, "tally/": STEP_METRICS}


def statistics(rank: int, name: str = "") -> str:
    """A batch statistic of a rank; without a name, their common prefix."""
    return f"{STATISTICS}{rank}/{name}"


def table(table: str, rank: int, column: str = "") -> str:
    """A column of a rank's rows; without a column, their common prefix."""
    return f"{TABLES}{table}/{rank}/{column}"


def step_metrics(rank: int) -> str:
    """The sums of a rank."""
    return f"{STEP_METRICS}{rank}"


def is_per_rank(name: str) -> bool:
    """Whether the name belongs to a section of which every rank has its own part."""
    return name.startswith(PER_RANK)


def rank_of(name: str) -> int | None:
    """The rank that a tensor of such a section belongs to; None if the name is malformed."""
    match = _RANK.fullmatch(name)
    return None if match is None else int(match[1] or match[2])


def from_format_2(name: str) -> str:
    """The current name of a tensor in a checkpoint of format 2."""
    for old, new in FORMAT_2.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name
