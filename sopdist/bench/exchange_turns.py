"""Work of the ranks of `sopdist bench exchange`: send rows, compute for a given time, send facts back.

The network is a loop of matrix products, which keeps a core (or a GPU) as busy as a network does, for any given time.
Half of it stands for the forward pass and half for the backward pass, after which the ranks wait for each other, as
they do for gradients. `bench table` measures the loss itself.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..noise.kernels import Facts, choose_kernels
from ..noise.kernels.facts import from_wire, to_wire
from ..noise.rates import Flow
from ..noise.rows import Layout, NoiseTable
from ..sample_table.exchange import Exchange, Update
from ..train.distributed.world import World
from .timing import synchronize, take_turns

Mode = Literal["ahead", "on request"]

_MATRIX = 192  # rows and columns; a product takes a fraction of a millisecond
_CALIBRATION = 50  # products
_STEPS = 5  # per turn


@dataclass(frozen=True)
class Cell:
    """One combination to measure."""

    classes: int
    layout: Layout
    batch: int  # samples per rank, equally many of each owner
    compute: float  # seconds per step
    mode: Mode

    def __str__(self) -> str:
        return f"{self.classes}, {self.layout}, {self.batch}, {self.compute}, {self.mode}"


@dataclass(frozen=True)
class Sizes:
    """Sizes of one run."""

    cells: tuple[Cell, ...]
    samples: int  # rows of each noise table
    seconds: float  # for all turns together
    min_rounds: int


class StepTime(NamedTuple):
    """Seconds of one step on one rank, and the bytes that it sent."""

    total: float
    push: float  # send the rows of the next step; 0 on request
    rows: float  # get the rows of this step: request them, wait, sort them
    facts: float  # send facts to the owners of the rows
    update: float  # wait for the facts of other ranks, and update the owned rows
    blocked: float  # waiting for the exchange
    in_flight: float  # rows and facts between ranks
    sent_bytes: float


def measure(world: World, sizes: Sizes) -> dict[str, Any]:
    """Turns of every cell on this rank."""
    tables = {
        (cell.classes, cell.layout): _table(world, sizes.samples, cell.classes, cell.layout) for cell in sizes.cells
    }
    product = _seconds_of_product(world)
    candidates = {
        str(cell): _Steps(world, tables[cell.classes, cell.layout], cell, round(cell.compute / product))
        for cell in sizes.cells
    }
    turns = take_turns(world, candidates, seconds=sizes.seconds, min_rounds=sizes.min_rounds, title="exchange")
    return {
        "device": world.device.type,
        "threads": torch.get_num_threads(),
        "turns": [turns[str(cell)] for cell in sizes.cells],
    }


class _Steps:
    """Steps of one cell, a turn per call; each turn continues where the previous one stopped."""

    def __init__(self, world: World, table: NoiseTable, cell: Cell, products: int) -> None:
        group = world.new_group()
        assert group is not None, "a single rank has nothing to exchange"
        self.world, self.cell, self.products = world, cell, products
        self.exchange = Exchange(group, table)
        self.batches = draw_batches(table.num_samples, cell.batch, world.size)
        self.labels, self.facts = _facts(cell, world)
        self.matrix = torch.eye(_MATRIX, device=world.device)
        self.update = _update_of(table)
        self.step = 0
        if cell.mode == "ahead":
            self.exchange.prefetch(list(self.batches[0]))

    def __call__(self) -> list[StepTime]:
        return [self._step() for _ in range(_STEPS)]

    def _step(self) -> StepTime:
        before = self.exchange.stats()
        index = torch.from_numpy(self.batches[self.step % len(self.batches), self.world.rank]).to(self.world.device)
        self.step += 1
        following = list(self.batches[self.step % len(self.batches)])
        ahead = self.cell.mode == "ahead"
        marks = [time.perf_counter()]
        if ahead:
            self.exchange.prefetch(following)
        marks.append(time.perf_counter())
        self._compute()
        marks.append(time.perf_counter())
        self.exchange.next_rows(index)
        marks.append(time.perf_counter())
        self.exchange.give(to_wire(self.labels, self.facts), self.update)
        marks.append(time.perf_counter())
        if ahead:  # facts are in flight during the backward pass
            self._compute()
            self.world.barrier()
            marks.append(time.perf_counter())
        self.exchange.flush()
        marks.append(time.perf_counter())
        if not ahead:  # any batch may be requested next, so the rows were updated before the backward pass
            self._compute()
            self.world.barrier()
        synchronize(self.world.device)
        end = time.perf_counter()
        after = self.exchange.stats()
        push, _, rows, facts, *_ = np.diff(marks).tolist()
        return StepTime(
            total=end - marks[0],
            push=push,
            rows=rows,
            facts=facts,
            update=marks[-1] - marks[-2],
            blocked=after.waited - before.waited,
            in_flight=after.travelled - before.travelled,
            sent_bytes=after.sent_bytes - before.sent_bytes,
        )

    def _compute(self) -> None:
        """Compute for half of a step."""
        for _ in range(self.products // 2):
            torch.mm(self.matrix, self.matrix)


def draw_batches(samples: int, batch: int, ranks: int) -> NDArray[np.int64]:
    """Disjoint batches of all ranks, (steps, ranks, batch), identical on every rank.

    Every batch has equally many samples of each owner, so that bytes can be counted exactly. Random batches come close
    to that.
    """
    random = np.random.default_rng(0)
    share = batch // ranks
    steps = samples // ranks // (share * ranks)
    owned = [random.permutation(samples // ranks) * ranks + owner for owner in range(ranks)]
    shares = [rows[: steps * ranks * share].reshape(steps, ranks, share) for rows in owned]
    return random.permuted(np.concatenate(shares, axis=2), axis=2)  # (steps, ranks, batch)


def _table(world: World, samples: int, classes: int, layout: Layout) -> NoiseTable:
    table = NoiseTable(samples, classes, layout=layout, first=world.rank, stride=world.size, device=world.device)
    for buffer in table.buffers():
        buffer.add_(0)  # touch every page: the page fault of the first use is not part of a step
    return table


def _facts(cell: Cell, world: World) -> tuple[Tensor, Facts]:
    """Labels and facts of a batch, from a network that is wrong half of the time."""
    random = torch.Generator().manual_seed(world.rank)
    labels = torch.randint(cell.classes, (cell.batch,), generator=random)
    wrong = torch.rand(cell.batch, generator=random) < 0.5
    predicted = (labels + wrong) % cell.classes
    loss, margin, pull, fit = torch.rand(4, cell.batch, generator=random)
    facts = (column.to(world.device) for column in (predicted, loss, margin, pull, fit))
    return labels.to(world.device), Facts(*facts)


def _update_of(table: NoiseTable) -> Update:
    kernels, step = choose_kernels(table.u.device), Flow().step()

    def update(rows: Tensor, columns: list[Tensor]) -> None:
        if len(rows):
            kernels.update_rows(table, rows, *from_wire(columns), step)

    return update


def _seconds_of_product(world: World) -> float:
    """Seconds per matrix product on the slowest rank, while all ranks compute."""
    matrix = torch.eye(_MATRIX, device=world.device)
    for _ in range(_CALIBRATION):
        torch.mm(matrix, matrix)
    world.barrier()
    seconds = []
    for _ in range(_CALIBRATION):
        start = time.perf_counter()
        torch.mm(matrix, matrix)
        synchronize(world.device)
        seconds.append(time.perf_counter() - start)
    return world.max([float(np.median(seconds))])[0]
