"""A sample table on any number of ranks: the same calls with one rank, which owns all rows, and with many."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from .exchange import Exchange, ExchangeStats, Update
from .table import SampleTable


class SharedTable:
    """The rows of a table for the batches of this rank. Every rank must make the same calls in the same order.

    For each (micro-)batch: `rows`, then `give` with the facts for the owners, which apply them in `flush`, or `skip`.
    """

    def __init__(self, table: SampleTable, group: dist.ProcessGroup | None) -> None:
        self.table = table
        self._exchange = None if group is None else Exchange(group, table)

    def prefetch(self, parts: Sequence[NDArray[np.int64]]) -> None:
        """Start sending the rows of a future batch; `parts` are the samples of each rank, in the order of ranks."""
        if self._exchange is not None:
            self._exchange.prefetch(parts)

    def rows(self, index: Tensor) -> list[Tensor]:
        """The sent columns for these samples, (B, ...) each."""
        if self._exchange is None:
            return [column[index] for column in self.table.sent_columns()]
        columns, rows = self._exchange.next_rows(index)
        return [column[rows] for column in columns]

    def give(self, index: Tensor, facts: Sequence[Tensor], update: Update) -> None:
        """Send facts about these samples, columns (B, ...), to the owners of their rows, which call `update`."""
        if self._exchange is None:
            update(index, list(facts))
        else:
            self._exchange.give(facts, update)

    def skip(self, count: int) -> None:
        """The rows of the next `count` samples were only read: there are no facts to send back."""
        if self._exchange is not None:
            self._exchange.skip(count)

    def flush(self) -> None:
        """Update the rows that this rank owns with facts that are still in flight."""
        if self._exchange is not None:
            self._exchange.flush()

    def discard_prefetched(self) -> None:
        """Drop rows in flight."""
        if self._exchange is not None:
            self._exchange.discard_prefetched()

    def gather(self, column: Tensor) -> Tensor:
        """One column of all rows, (N,), from the rows of each rank. Collective."""
        return column if self._exchange is None else self._exchange.gather_column(column)

    def stats(self) -> ExchangeStats:
        """The cost of sending rows so far."""
        return ExchangeStats() if self._exchange is None else self._exchange.stats()
