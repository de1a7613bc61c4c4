"""What the ranks of `sopdist bench exchange` do: rows there, facts back, and in between as much computing as is asked.

The network is a loop of matrix products: work that keeps a core (or a GPU) as busy as a network does, of any length.
Half of it stands for the forward and half for the backward pass, at whose end ranks wait for each other, as they do for
gradients. The loss itself has a bench of its own.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..noise.exchange import Exchange, Update
from ..noise.kernels import Facts, choose_kernels
from ..noise.rates import Flow
from ..noise.rows import Layout, NoiseTable
from ..train.world import World
from .turns import take_turns

Mode = Literal["ahead", "asked"]

_MATRIX = 192  # rows and columns; a product takes a fraction of a millisecond
_CALIBRATION = 50  # products
_STEPS = 5  # of a turn


@dataclass(frozen=True)
class Cell:
    """One thing to measure."""

    classes: int
    layout: Layout
    batch: int  # samples of each rank, as many of each owner
    compute: float  # seconds of a step's computing
    mode: Mode

    def __str__(self) -> str:
        return f"{self.classes}, {self.layout}, {self.batch}, {self.compute}, {self.mode}"


@dataclass(frozen=True)
class Sizes:
    """What one run measures."""

    cells: tuple[Cell, ...]
    samples: int  # rows of each noise table
    seconds: float  # for all turns
    fewest: int  # rounds


class StepTime(NamedTuple):
    """Seconds of one step on one rank, and bytes that it sent."""

    whole: float
    push: float  # send the rows of the next step; asked: 0
    rows: float  # get this step's rows: ask for them, wait, sort them
    facts: float  # send facts to the owners of the rows
    update: float  # wait for facts of others, and update the rows that they are about
    waited: float
    travelled: float
    sent_bytes: float


def measure(world: World, sizes: Sizes) -> dict[str, Any]:
    """On one rank: the turns of every cell."""
    tables = {
        (cell.classes, cell.layout): _table(world, sizes.samples, cell.classes, cell.layout) for cell in sizes.cells
    }
    product = _seconds_of_product(world)
    candidates = {
        str(cell): _Steps(world, tables[cell.classes, cell.layout], cell, round(cell.compute / product))
        for cell in sizes.cells
    }
    turns = take_turns(world, candidates, seconds=sizes.seconds, fewest=sizes.fewest, title="exchange")
    return {
        "device": world.device.type,
        "threads": torch.get_num_threads(),
        "turns": [turns[str(cell)] for cell in sizes.cells],
    }


class _Steps:
    """A turn of steps of one cell; goes on with the next turn where the last one ended."""

    def __init__(self, world: World, table: NoiseTable, cell: Cell, products: int) -> None:
        group = world.new_group()
        assert group is not None, "one rank has nothing to exchange"
        self.world, self.cell, self.products = world, cell, products
        self.exchange = Exchange(group, table)
        self.parts = draw_parts(table.num_samples, cell.batch, world.size)
        self.labels, self.facts = _facts(cell, world)
        self.matrix = torch.eye(_MATRIX, device=world.device)
        self.update = _update_of(table)
        self.number = 0
        if cell.mode == "ahead":
            self.exchange.expect(list(self.parts[0]))

    def __call__(self) -> list[StepTime]:
        return [self._step() for _ in range(_STEPS)]

    def _step(self) -> StepTime:
        before = self.exchange.stats()
        index = torch.from_numpy(self.parts[self.number % len(self.parts), self.world.rank]).to(self.world.device)
        self.number += 1
        following = list(self.parts[self.number % len(self.parts)])
        ahead = self.cell.mode == "ahead"
        marks = [time.perf_counter()]
        if ahead:
            self.exchange.expect(following)
        marks.append(time.perf_counter())
        self._compute()
        marks.append(time.perf_counter())
        self.exchange.next_rows(index)
        marks.append(time.perf_counter())
        self.exchange.give(self.labels, self.facts, self.update)
        marks.append(time.perf_counter())
        if ahead:  # facts travel during the backward pass; a batch that was asked for may be followed by any other
            self._compute()
            self.world.barrier()
            marks.append(time.perf_counter())
        self.exchange.settle()
        marks.append(time.perf_counter())
        if not ahead:
            self._compute()
            self.world.barrier()
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)
        end = time.perf_counter()
        after = self.exchange.stats()
        push, _, rows, facts, *_ = np.diff(marks).tolist()
        return StepTime(
            whole=end - marks[0],
            push=push,
            rows=rows,
            facts=facts,
            update=marks[-1] - marks[-2],
            waited=after.waited - before.waited,
            travelled=after.travelled - before.travelled,
            sent_bytes=after.sent_bytes - before.sent_bytes,
        )

    def _compute(self) -> None:
        """Half of a step."""
        for _ in range(self.products // 2):
            torch.mm(self.matrix, self.matrix)


def draw_parts(samples: int, batch: int, ranks: int) -> NDArray[np.int64]:
    """Batches of all ranks, (steps, ranks, batch), the same on every rank; no sample is in two of them.

    Every batch has as many samples of each owner, so that bytes can be counted exactly: what is drawn at random comes
    close to that.
    """
    random = np.random.default_rng(0)
    share = batch // ranks
    steps = samples // ranks // (share * ranks)
    owned = [random.permutation(samples // ranks) * ranks + owner for owner in range(ranks)]
    dealt = [rows[: steps * ranks * share].reshape(steps, ranks, share) for rows in owned]
    return random.permuted(np.concatenate(dealt, axis=2), axis=2)  # (steps, ranks, batch)


def _table(world: World, samples: int, classes: int, layout: Layout) -> NoiseTable:
    table = NoiseTable(samples, classes, layout=layout, first=world.rank, stride=world.size, device=world.device)
    for buffer in table.buffers():
        buffer.add_(0)  # memory never written to costs a page fault at its first use, which is no cost of a step
    return table


def _facts(cell: Cell, world: World) -> tuple[Tensor, Facts]:
    """Labels and facts of a batch from a network that errs in half of the cases."""
    random = torch.Generator().manual_seed(world.rank)
    labels = torch.randint(cell.classes, (cell.batch,), generator=random)
    wrong = torch.rand(cell.batch, generator=random) < 0.5
    predicted = (labels + wrong) % cell.classes
    loss, margin, pull = torch.rand(3, cell.batch, generator=random)
    facts = (column.to(world.device) for column in (predicted, loss, margin, pull))
    return labels.to(world.device), Facts(*facts)


def _update_of(table: NoiseTable) -> Update:
    kernels, step = choose_kernels(table.u.device), Flow().step()

    def update(rows: Tensor, labels: Tensor, facts: Facts) -> None:
        if len(rows):
            kernels.update_rows(table, rows, labels, facts, step)

    return update


def _seconds_of_product(world: World) -> float:
    """Of one matrix product while all ranks compute, on the slowest of them."""
    matrix = torch.eye(_MATRIX, device=world.device)
    for _ in range(_CALIBRATION):
        torch.mm(matrix, matrix)
    world.barrier()
    seconds = []
    for _ in range(_CALIBRATION):
        begun = time.perf_counter()
        torch.mm(matrix, matrix)
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        seconds.append(time.perf_counter() - begun)
    return world.max([float(np.median(seconds))])[0]
