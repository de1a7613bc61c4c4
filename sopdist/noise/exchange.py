"""The exchange: rows of the noise table across ranks.

Row i lives on rank i mod W, its *owner*. A batch needs rows of all owners, so for each batch

    1. routes     everybody finds out who needs which rows: from the plan, which every rank knows, or by asking;
    2. rows       owners push the rows, a step ahead if they could be told what is next, while the network computes;
    3. facts      what travels back is not rows but facts, a few bytes a sample whatever the number of classes, and the
                  owner applies the update.

Two ranks, batch [0, 3 | 4, 1]: rank 0 sees samples 0 and 3, rank 1 sees 4 and 1. Rank 0 owns 0 and 4, rank 1 owns 3
and 1. Rank 0 keeps row 0 and pushes row 4 to rank 1; rank 1 pushes row 3 and keeps row 1. Each sorts what it got into
the order of its batch. After the loss rank 0 sends the facts of 3 to rank 1, and gets those of 4.

An owner applies facts in the order of ranks, and within a rank in that of its batch: so a table that is dealt to ranks
ends as the same table, bit for bit, as one table that saw the ranks' parts joined to one batch. With one visit of a
sample an epoch, fetching a step ahead is exact; between epochs `settle` has to come first.

This file moves rows and facts. It knows neither the loss nor the rule of an update.
"""

from __future__ import annotations

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

from .kernels.facts import Facts
from .rows import DEFAULT_SLOTS, Layout, NoiseTable, RowBlock, class_dtype

FACT_WIRE_BYTES = 5 * 4  # label, predicted class, loss, margin, pull

Update = Callable[[Tensor, Tensor, Facts], None]  # rows, labels, facts


def row_wire_bytes(layout: Layout, num_classes: int, slots: int = DEFAULT_SLOTS) -> int:
    """Bytes of a row on its way to the rank that needs it: u, v and, for slots, the classes."""
    if layout == "dense":
        return 4 + 4 * num_classes
    return 4 + min(slots, num_classes) * (4 + class_dtype(num_classes).itemsize)


@dataclass(frozen=True)
class Route:
    """Who needs which rows for one batch, as one rank sees it."""

    order: Tensor  # (B,): the places of my batch, sorted by owner
    from_owner: list[int]  # how many of my samples each rank owns
    rows: Tensor  # rows of my table that are needed, sorted by the rank that needs them
    to_rank: list[int]  # how many of them each rank needs


def planned_route(parts: Sequence[NDArray[np.int64]], rank: int, device: torch.device) -> Route:
    """The route of a batch of which every rank's samples are known, by arithmetic alone."""
    ranks = len(parts)
    owner = parts[rank] % ranks
    whole = np.concatenate(parts)
    reader = np.repeat(np.arange(ranks), [len(part) for part in parts])  # the rank that sees each sample
    mine = whole % ranks == rank
    return Route(
        torch.from_numpy(np.argsort(owner, kind="stable")).to(device),
        np.bincount(owner, minlength=ranks).tolist(),
        torch.from_numpy(whole[mine] // ranks).to(device),
        np.bincount(reader[mine], minlength=ranks).tolist(),
    )


@dataclass
class Passage:
    """A batch on its way: its rows that come, and then its facts that go back."""

    route: Route
    rows: Tensor  # bytes that arrive: (B, row bytes), sorted by owner
    arriving: dist.Work | None
    block: RowBlock | None = None  # the same in the order of the batch
    used: int = 0  # samples whose loss has been computed
    labels: list[Tensor] = field(default_factory=list)
    facts: list[Facts] = field(default_factory=list)


@dataclass(frozen=True)
class ExchangeStats:
    """What the exchange has cost this rank so far."""

    waited: float = 0.0  # seconds that training stood still for it
    travelled: float = 0.0  # seconds between sending and arrival, over all messages; not known of GPUs, where it is 0
    sent_bytes: int = 0  # to other ranks

    def since(self, before: ExchangeStats) -> ExchangeStats:
        """What came after an earlier look."""
        sent = self.sent_bytes - before.sent_bytes
        return ExchangeStats(self.waited - before.waited, self.travelled - before.travelled, sent)


class Exchange:
    """Rows and facts of one rank's batches. Every rank of the group must make the same calls in the same order."""

    def __init__(self, group: dist.ProcessGroup, table: NoiseTable) -> None:
        self.group, self.table = group, table
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self._coming: deque[Passage] = deque()
        self._unsettled: tuple[Route, Tensor, dist.Work, Update] | None = None
        self._clock = _Waits(on_gpu=table.u.is_cuda)
        self._sent_bytes = 0

    # -- rows ----------------------------------------------------------------------------------------------------------

    def expect(self, parts: Sequence[NDArray[np.int64]]) -> None:
        """Start sending the rows of a batch to come; `parts` are the samples of each rank, in the ranks' order."""
        if len(parts) != self.ranks:
            raise ValueError(f"expected the samples of {self.ranks} ranks, got those of {len(parts)}")
        self._send_rows(planned_route(parts, self.rank, self.table.u.device))

    def next_rows(self, index: Tensor) -> tuple[RowBlock, Tensor]:
        """The rows of these samples, and the row of each: of the batch that was expected or a piece of it, or asked for
        now."""
        if not self._coming:
            self._ask(index)
        passage = self._coming[0]
        if passage.block is None:
            self._clock.wait(passage.arriving)
            passage.block = self._unpacked(passage)
        place = torch.arange(passage.used, passage.used + len(index), device=index.device)
        if passage.used + len(index) > len(passage.rows):
            raise RuntimeError(f"{len(passage.rows)} samples were expected, the batch has more")
        return passage.block, place

    def skip(self, count: int) -> None:
        """So many samples of the batch were only looked at: there is nothing to tell their owners."""
        self._use(count)

    def drain(self) -> None:
        """Rows that were expected will not be needed: wait until they have arrived, and drop them."""
        while self._coming:
            self._clock.wait(self._coming.popleft().arriving)

    # -- facts ---------------------------------------------------------------------------------------------------------

    def give(self, labels: Tensor, facts: Facts, update: Update) -> bool:
        """Hand in the facts of a piece of the batch; with its last piece they travel. True if they do now."""
        passage = self._coming[0]
        passage.labels.append(labels)
        passage.facts.append(facts)
        if not self._use(len(labels)):
            return False
        self.settle()
        columns = [torch.cat(passage.labels), *(torch.cat(column) for column in zip(*passage.facts, strict=True))]
        integers = [column.to(torch.int32) for column in columns[:2]]
        floats = [column.view(torch.int32) for column in columns[2:]]
        packed = torch.stack(integers + floats, dim=1)[passage.route.order]  # (B, 5)
        route = passage.route
        arrived, work = self._all_to_all(packed, route.to_rank, route.from_owner)
        self._unsettled = (route, arrived, work, update)
        return True

    def settle(self) -> None:
        """Wait for facts under way, and update the rows that this rank owns."""
        if self._unsettled is None:
            return
        (route, packed, work, update), self._unsettled = self._unsettled, None
        self._clock.wait(work)
        label, predicted = (packed[:, n].to(torch.int64) for n in (0, 1))
        floats = (packed[:, n].contiguous().view(torch.float32) for n in (2, 3, 4))
        update(route.rows, label, Facts(predicted, *floats))

    # -- what all ranks own together -----------------------------------------------------------------------------------

    def whole(self, column: Tensor) -> Tensor:
        """One column of all rows, (N,), out of each rank's (R,); every rank gets it."""
        samples = self.table.num_samples
        longest = -(-samples // self.ranks)
        mine = torch.zeros(longest, dtype=column.dtype, device=column.device)
        mine[: len(column)] = column
        as_bytes = mine.view(torch.uint8)  # gloo and NCCL know no bool
        parts = [torch.empty_like(as_bytes) for _ in range(self.ranks)]
        dist.all_gather(parts, as_bytes, group=self.group)
        together = torch.stack(
            [part.view(column.dtype) for part in parts], dim=1
        )  # (longest, ranks): row-major = index
        return together.reshape(-1)[:samples]

    def total(self, values: Tensor) -> Tensor:
        """The sum of each rank's values."""
        values = values.detach().clone()
        self._clock.wait(dist.all_reduce(values, group=self.group, async_op=True))
        return values

    def stats(self) -> ExchangeStats:
        """What the exchange has cost so far; on a GPU this waits for the device."""
        return ExchangeStats(*self._clock.read(), self._sent_bytes)

    # -- the wire ------------------------------------------------------------------------------------------------------

    def _ask(self, index: Tensor) -> None:
        """A batch that nobody expected: tell the owners what is needed."""
        owner = index % self.ranks
        ordered, order = owner.sort(stable=True)
        counts = torch.bincount(ordered, minlength=self.ranks)
        asked = torch.empty_like(counts)
        self._clock.wait(dist.all_to_all_single(asked, counts, group=self.group, async_op=True))
        from_owner, to_rank = counts.tolist(), asked.tolist()
        samples, work = self._all_to_all(index[order], to_rank, from_owner)
        self._clock.wait(work)
        self._send_rows(Route(order, from_owner, samples // self.ranks, to_rank))

    def _send_rows(self, route: Route) -> None:
        table, rows = self.table, route.rows
        columns = [table.u[rows][:, None], table.v[rows], *(() if table.classes is None else (table.classes[rows],))]
        packed = torch.cat([column.contiguous().view(torch.uint8) for column in columns], dim=1)  # (rows, row bytes)
        arrived, work = self._all_to_all(packed, route.from_owner, route.to_rank)
        self._coming.append(Passage(route, arrived, work))

    def _unpacked(self, passage: Passage) -> RowBlock:
        table, width = self.table, 4 + 4 * self.table.v.shape[1]
        in_order = torch.empty_like(passage.rows)
        in_order[passage.route.order] = passage.rows
        u, v, classes = (part.contiguous() for part in in_order.tensor_split((4, width), dim=1))
        kind = None if table.classes is None else classes.view(table.classes.dtype)
        return RowBlock(u.view(torch.float32)[:, 0], v.view(torch.float32), kind)

    def _use(self, count: int) -> bool:
        """So many samples of the batch are done; True if it is all of them."""
        passage = self._coming[0]
        passage.used += count
        done = passage.used >= len(passage.rows)
        if done:
            self._coming.popleft()
        return done

    def _all_to_all(self, packed: Tensor, receive: list[int], send: list[int]) -> tuple[Tensor, dist.Work]:
        """Send `send[r]` rows of `packed` to each rank r, in order; the answer has `receive[r]` rows of each."""
        arrived = torch.empty(sum(receive), *packed.shape[1:], dtype=packed.dtype, device=packed.device)
        work = dist.all_to_all_single(arrived, packed, receive, send, group=self.group, async_op=True)
        assert work is not None
        self._clock.started(work)
        others = sum(send) - send[self.rank]
        self._sent_bytes += others * packed[:1].numel() * packed.element_size() if len(packed) else 0
        return arrived, work


class _Waits:
    """How long training stood still: by the host's clock, or, where only the GPU's stream waits, by the stream's."""

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._waited = self._travelled = 0.0
        self._events: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def started(self, work: dist.Work) -> None:
        """A message has been sent; note when it will have arrived, which a GPU does not tell."""
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
        while self._events and self._events[0][1].query():  # nobody may ever ask
            self._add(*self._events.popleft())

    def read(self) -> tuple[float, float]:
        while self._events:
            self._events[0][1].synchronize()
            self._add(*self._events.popleft())
        return self._waited, self._travelled

    def _add(self, before: torch.cuda.Event, after: torch.cuda.Event) -> None:
        self._waited += before.elapsed_time(after) / 1000
