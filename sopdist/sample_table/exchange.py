"""The exchange: rows of a sample table across ranks.

Row i lives on rank i mod W, its *owner*. A batch needs rows of all owners, so for each batch

    1. routes     every rank determines which rank needs which rows: from the plan, which all ranks know, or on request;
    2. rows       owners push the rows, one step ahead if the next batch is known, while the network computes;
    3. facts      ranks send back what the update needs: a few bytes per sample, or new rows. The owner applies it.

Two ranks, batch [0, 3 | 4, 1]: rank 0 computes samples 0 and 3, rank 1 computes 4 and 1. Rank 0 owns 0 and 4, rank 1
owns 3 and 1. Rank 0 keeps row 0 and pushes row 4 to rank 1; rank 1 pushes row 3 and keeps row 1. Each sorts what it
received into the order of its batch. After the loss, rank 0 sends the facts of 3 to rank 1 and receives those of 4.

An owner applies facts in the order of ranks, and within a rank in the order of its batch. So a sharded table ends up
the same, bit for bit, as one table that saw the ranks' parts concatenated to one batch. With one visit of a sample per
epoch, fetching one step ahead is exact; between epochs, call `flush` first.

This file moves columns of any dtype and shape. It knows neither what they mean nor how they are updated.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from .table import SampleTable

Update = Callable[[Tensor, list[Tensor]], None]  # local rows that this rank owns, and the facts about each


@dataclass(frozen=True)
class Route:
    """Which rank needs which rows for one batch, from the point of view of one rank."""

    order: Tensor  # (B,): the positions of my batch, sorted by owner
    from_owner: list[int]  # how many of my samples each rank owns
    rows: Tensor  # rows of my table that are needed, sorted by the rank that needs them
    to_rank: list[int]  # how many of them each rank needs
    samples: int  # of the batch, over all ranks


def planned_route(parts: Sequence[NDArray[np.int64]], rank: int, device: torch.device) -> Route:
    """The route of a batch for which the samples of every rank are known, by arithmetic alone."""
    ranks = len(parts)
    owner = parts[rank] % ranks
    batch = np.concatenate(parts)
    reader = np.repeat(np.arange(ranks), [len(part) for part in parts])  # the rank that computes each sample
    mine = batch % ranks == rank
    return Route(
        torch.from_numpy(np.argsort(owner, kind="stable")).to(device),
        np.bincount(owner, minlength=ranks).tolist(),
        torch.from_numpy(batch[mine] // ranks).to(device),
        np.bincount(reader[mine], minlength=ranks).tolist(),
        len(batch),
    )


@dataclass
class InFlight:
    """A batch whose rows are in flight, or have arrived and wait for its facts."""

    route: Route
    packed: Tensor  # bytes that arrive: (B, row bytes), sorted by owner
    arriving: dist.Work | None
    columns: list[Tensor] | None = None  # the same, unpacked, in the order of the batch
    used: int = 0  # samples whose loss has been computed
    facts: list[Sequence[Tensor]] = field(default_factory=list)  # of each micro-batch so far


@dataclass(frozen=True)
class ExchangeStats:
    """The cost of the exchange on this rank so far."""

    waited: float = 0.0  # seconds for which it blocked training
    travelled: float = 0.0  # seconds between sending and arrival, over all messages; unknown on GPUs, where it is 0
    sent_bytes: int = 0  # to other ranks

    def since(self, before: ExchangeStats) -> ExchangeStats:
        """The difference from an earlier reading."""
        sent = self.sent_bytes - before.sent_bytes
        return ExchangeStats(self.waited - before.waited, self.travelled - before.travelled, sent)


class Exchange:
    """Rows and facts of one rank's batches. Every rank of the group must make the same calls in the same order."""

    def __init__(self, group: dist.ProcessGroup, table: SampleTable) -> None:
        self.group, self.table = group, table
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self._batches: deque[InFlight] = deque()
        self._unapplied: tuple[Route, Tensor, list[Tensor], dist.Work, Update] | None = None
        self._clock = _Waits(on_gpu=table.device.type == "cuda")
        self._sent_bytes = 0
        self.samples = 0  # of all batches whose facts were given so far, over all ranks

    @property
    def idle(self) -> bool:
        """Whether no rows are on their way or wait for their facts."""
        return not self._batches

    # -- rows ----------------------------------------------------------------------------------------------------------

    def prefetch(self, parts: Sequence[NDArray[np.int64]]) -> None:
        """Start sending the rows of a future batch; `parts` are the samples of each rank, in the order of ranks."""
        if len(parts) != self.ranks:
            raise ValueError(f"expected the samples of {self.ranks} ranks, got those of {len(parts)}")
        self._send_rows(planned_route(parts, self.rank, self.table.device))

    def next_rows(self, index: Tensor) -> tuple[list[Tensor], Tensor]:
        """The sent columns for these samples, and the row of each sample in them.

        They belong to the batch that was prefetched, or to a micro-batch of it; otherwise they are requested now.
        """
        if not self._batches:
            self._ask(index)
        batch = self._batches[0]
        if batch.columns is None:
            self._clock.wait(batch.arriving)
            in_order = torch.empty_like(batch.packed)
            in_order[batch.route.order] = batch.packed
            batch.columns = _unpack(in_order, self.table.sent_columns())
        rows = torch.arange(batch.used, batch.used + len(index), device=index.device)
        if batch.used + len(index) > len(batch.packed):
            raise RuntimeError(f"{len(batch.packed)} samples were prefetched, the batch has more")
        return batch.columns, rows

    def skip(self, count: int) -> None:
        """The next `count` samples of the batch were only read: there are no facts to send back."""
        self._use(count)

    def discard_prefetched(self) -> None:
        """The batch that was prefetched will not be computed: wait until its rows have arrived, and drop them."""
        while self._batches:
            self._clock.wait(self._batches.popleft().arriving)

    # -- facts ---------------------------------------------------------------------------------------------------------

    def give(self, facts: Sequence[Tensor], update: Update) -> bool:
        """Add the facts of a (micro-)batch, columns of shape (B, ...). True if it was the last one: all are then sent.

        `update` is called by `flush` on the owner, with the facts of all ranks.
        """
        batch = self._batches[0]
        batch.facts.append(facts)
        if not self._use(len(facts[0])):
            return False
        self.flush()
        columns = [torch.cat(column) for column in zip(*batch.facts, strict=True)]
        route = batch.route
        self.samples += route.samples
        arrived, work = self._all_to_all(_pack(columns)[route.order], route.to_rank, route.from_owner)
        self._unapplied = (route, arrived, columns, work, update)
        return True

    def flush(self) -> None:
        """Wait for facts in flight, and update the rows that this rank owns."""
        if self._unapplied is None:
            return
        (route, packed, columns, work, update), self._unapplied = self._unapplied, None
        self._clock.wait(work)
        update(route.rows, _unpack(packed, columns))

    # -- over all ranks ------------------------------------------------------------------------------------------------

    def gather_column(self, column: Tensor) -> Tensor:
        """One column of all rows, (N,), from each rank's (R,). Every rank gets it."""
        samples = self.table.num_samples
        longest = -(-samples // self.ranks)
        mine = torch.zeros(longest, dtype=column.dtype, device=column.device)
        mine[: len(column)] = column
        as_bytes = mine.view(torch.uint8)  # gloo and NCCL have no bool
        parts = [torch.empty_like(as_bytes) for _ in range(self.ranks)]
        dist.all_gather(parts, as_bytes, group=self.group)
        by_rank = [part.view(column.dtype) for part in parts]
        return torch.stack(by_rank, dim=1).reshape(-1)[:samples]  # (longest, ranks): row-major is by sample index

    def sum(self, values: Tensor) -> Tensor:
        """The sum of each rank's values."""
        values = values.detach().clone()
        self._clock.wait(dist.all_reduce(values, group=self.group, async_op=True))
        return values

    def stats(self) -> ExchangeStats:
        """The cost of the exchange so far; on a GPU this waits for the device."""
        return ExchangeStats(*self._clock.read(), self._sent_bytes)

    # -- the wire ------------------------------------------------------------------------------------------------------

    def _ask(self, index: Tensor) -> None:
        """Request the rows of a batch that was not prefetched: send the indices to the owners."""
        owner = index % self.ranks
        ordered, order = owner.sort(stable=True)
        counts = torch.bincount(ordered, minlength=self.ranks)
        mine = torch.stack([counts, torch.full_like(counts, len(index))], dim=1)  # (ranks, 2)
        asked = torch.empty_like(mine)
        self._clock.wait(dist.all_to_all_single(asked, mine, group=self.group, async_op=True))
        from_owner, (to_rank, lengths) = counts.tolist(), asked.T.tolist()
        samples, work = self._all_to_all(index[order], to_rank, from_owner)
        self._clock.wait(work)
        self._send_rows(Route(order, from_owner, samples // self.ranks, to_rank, sum(lengths)))

    def _send_rows(self, route: Route) -> None:
        packed = _pack([column[route.rows] for column in self.table.sent_columns()])
        arrived, work = self._all_to_all(packed, route.from_owner, route.to_rank)
        self._batches.append(InFlight(route, arrived, work))

    def _use(self, count: int) -> bool:
        """Mark `count` more samples of the batch as done; True if it is complete."""
        batch = self._batches[0]
        batch.used += count
        done = batch.used >= len(batch.packed)
        if done:
            self._batches.popleft()
        return done

    def _all_to_all(self, packed: Tensor, receive: list[int], send: list[int]) -> tuple[Tensor, dist.Work]:
        """Send `send[r]` rows of `packed` to each rank r, in order; the result has `receive[r]` rows from each."""
        arrived = torch.empty(sum(receive), *packed.shape[1:], dtype=packed.dtype, device=packed.device)
        work = dist.all_to_all_single(arrived, packed, receive, send, group=self.group, async_op=True)
        assert work is not None
        self._clock.started(work)
        others = sum(send) - send[self.rank]
        self._sent_bytes += others * packed[:1].numel() * packed.element_size() if len(packed) else 0
        return arrived, work


def _pack(columns: Sequence[Tensor]) -> Tensor:
    """Columns (B, ...) of any dtype as bytes, (B, row bytes)."""
    flat = [column.flatten(1) if column.dim() > 1 else column[:, None] for column in columns]
    return torch.cat([column.contiguous().view(torch.uint8) for column in flat], dim=1)


def _unpack(packed: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The columns in `packed` (B, row bytes), with the dtypes and row shapes of `like`."""
    widths = [math.prod(column.shape[1:]) * column.element_size() for column in like]
    # A clone, not `contiguous()`, which leaves a slice of a single row with a stride that other dtypes cannot view.
    parts = (part.clone(memory_format=torch.contiguous_format) for part in packed.split(widths, dim=1))
    return [
        part.view(column.dtype).reshape(len(packed), *column.shape[1:])
        for part, column in zip(parts, like, strict=True)
    ]


class _Waits:
    """How long the exchange blocked training: on the host clock, or on a GPU stream if only that waits."""

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._waited = self._travelled = 0.0
        self._events: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def started(self, work: dist.Work) -> None:
        """Called after a message was sent: record when it arrives, which a GPU does not report."""
        if self._on_gpu:
            return
        begun = time.perf_counter()

        def arrived(_: Any) -> None:
            self._travelled += time.perf_counter() - begun

        work.get_future().add_done_callback(arrived)

    def wait(self, work: dist.Work | None) -> None:
        if work is None:
            return
        if not self._on_gpu:
            begun = time.perf_counter()
            work.wait()
            self._waited += time.perf_counter() - begun
            return
        marks = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        marks[0].record()
        work.wait()
        marks[1].record()
        self._events.append(marks)
        while self._events and self._events[0][1].query():  # `read` may never be called
            self._add(*self._events.popleft())

    def read(self) -> tuple[float, float]:
        while self._events:
            self._events[0][1].synchronize()
            self._add(*self._events.popleft())
        return self._waited, self._travelled

    def _add(self, before: torch.cuda.Event, after: torch.cuda.Event) -> None:
        self._waited += before.elapsed_time(after) / 1000
