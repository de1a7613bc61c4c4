"""A second sample table, as small as one can be: a running mean of K floats per sample. Its rows travel both ways."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sopdist.sample_table import Exchange, SampleTable

FORMAT = 1


class MeanTable(SampleTable):
    """Row i: the mean of what was seen of sample i, and how often that was."""

    sent = ("mean", "visits")

    mean: Tensor  # (rows, K) float64
    visits: Tensor  # (rows,) int16

    def __init__(self, num_samples: int, num_classes: int, *, first: int = 0, stride: int = 1) -> None:
        super().__init__(num_samples, num_classes, first=first, stride=stride)
        self.register_buffer("mean", torch.zeros(len(self), num_classes, dtype=torch.float64))
        self.register_buffer("visits", torch.zeros(len(self), dtype=torch.int16))
        self.register_meta(FORMAT)

    def write(self, rows: Tensor, columns: Sequence[Tensor]) -> None:
        """Replace rows that this rank owns."""
        self.mean[rows], self.visits[rows] = columns


def visit(table: MeanTable, exchange: Exchange | None, index: Tensor, seen: Tensor) -> None:
    """Add what was seen (B, K) of samples (B,): read the rows, compute new ones, send them back to their owners."""
    columns, rows = (table.sent_columns(), index) if exchange is None else exchange.next_rows(index)
    mean, visits = (column[rows] for column in columns)
    visits = visits + 1
    mean = mean + (seen - mean) / visits[:, None]
    if exchange is None:
        table.write(index, [mean, visits])
    else:
        exchange.give([mean, visits], table.write)
