"""The base of methods that keep sample tables or need the batch of all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from ..sample_table import ExchangeStats, SampleTable, SharedTable
from .global_batch import GlobalBatch
from .method import Method, Setup, Trainer


class TableMethod(Method):
    """Creates the tables that `make_tables` returns, and keeps them and `batch`, the batch of all ranks, up to date."""

    batch: GlobalBatch
    shared: dict[str, SharedTable]

    def make_tables(self, setup: Setup, *, first: int, stride: int) -> dict[str, SampleTable]:  # noqa: ARG002
        """The tables of this rank, by name: rows `first`, `first + stride`, ... on `setup.device`."""
        return {}

    def start(self, setup: Setup) -> None:
        """Create the tables, sharded across the ranks of the group."""
        self.setup = setup
        self.batch = GlobalBatch(setup)
        rank = 0 if setup.group is None else dist.get_rank(setup.group)
        tables = self.make_tables(setup, first=rank, stride=setup.ranks)
        self.shared = {name: SharedTable(table, setup.group) for name, table in tables.items()}

    def between_epochs(self, epoch: int, trainer: Trainer) -> None:  # noqa: ARG002
        """Count the steps of the epoch from 0."""
        self.batch.begin_epoch()

    def prefetch(self, batch: NDArray[np.integer[Any]]) -> None:
        """Start sending the rows that this batch needs."""
        parts = self.batch.announce(batch)
        for table in self.shared.values():
            table.prefetch(parts)

    def flush(self) -> None:
        """Update the rows that this rank owns."""
        for table in self.shared.values():
            table.flush()
        self.batch.finish()

    def discard_prefetched(self) -> None:
        """Drop rows in flight."""
        self.batch.discard()
        for table in self.shared.values():
            table.discard_prefetched()

    def tables(self) -> dict[str, SampleTable]:
        """All tables."""
        return {name: shared.table for name, shared in self.shared.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """The counters, on which random numbers depend."""
        return {"counters": self.batch.counters}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore everything that `state_dict` returns, in place."""
        for name, value in self.state_dict().items():
            if state[name].shape != value.shape:
                raise ValueError(f"{name} is {tuple(state[name].shape)} there and {tuple(value.shape)} here")
            value.copy_(state[name])

    def exchange_stats(self) -> ExchangeStats:
        """The cost of sending rows so far, over all tables."""
        total = ExchangeStats()
        for table in self.shared.values():
            found = table.stats()
            total = ExchangeStats(
                total.waited + found.waited, total.travelled + found.travelled, total.sent_bytes + found.sent_bytes
            )
        return total

    def scaled_to_batch(self, loss: Tensor, weight: Tensor) -> Tensor:
        """Multiply a mean over the global batch by the weight of that batch, as `StepOutput.loss` expects.

        `weight` (B,) has the weights of this rank's samples. Collective.
        """
        total: Tensor = loss * self.batch.sum(weight.sum()).clamp_min(torch.finfo(torch.float32).tiny)
        return total
