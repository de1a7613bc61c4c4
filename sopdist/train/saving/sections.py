"""The sections of a checkpoint: one owner each, which both writes and reads it.

| section                                                     | owner    |
| network, optimizer, statistics, last_finite_statistics      | engine   |
| average                                                     | average  |
| tables, method                                              | method   |
| step_metrics                                                | reporter |
| step, best, ... in checkpoint.json                          | progress |

`checkpoint/names.py` has the names. Replicated state is written once, distributed over the ranks by size.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from ...checkpoint import Checkpoint, names
from ...checkpoint.fragments import Fragment
from ...errors import DataError
from ...methods import Method
from ..distributed.world import CollectiveError, World
from ..engine import Engine
from ..progress import Progress
from ..record.reporter import Reporter
from ..session import Session
from ..weight_average import WeightAverage

_logger = logging.getLogger("sopdist.train")


@dataclass(frozen=True)
class Content:
    """What this rank contributes to a checkpoint. Tensors are views, not copies."""

    replicated: dict[str, Tensor] = field(default_factory=dict)  # identical on every rank
    own: dict[str, Fragment] = field(default_factory=dict)  # only this rank has it
    about: dict[str, Any] = field(default_factory=dict)  # for checkpoint.json; identical on every rank


class Section(Protocol):
    """A part of a run that is saved."""

    def save(self) -> Content:
        """The current state, as it is written."""

    def load(self, saved: Checkpoint) -> None:
        """Restore it. Collective."""


class EngineSection:
    """The network, its batch statistics, the optimizer and the loss scale."""

    def __init__(self, engine: Engine, world: World, *, load_optimizer: bool = True) -> None:
        self._engine, self._world, self._load_optimizer = engine, world, load_optimizer

    def save(self) -> Content:
        """Under ZeRO, partitioned weights and optimizer state are fragments of this rank."""
        engine, rank = self._engine, self._world.rank
        network, optimizer = engine.own_fragments()
        own = {names.NETWORK + name: fragment for name, fragment in network.items()}
        own |= {names.OPTIMIZER + name: fragment for name, fragment in optimizer.items()}
        own |= {names.statistics(rank, name): Fragment.full(value) for name, value in engine.statistics().items()}
        replicated = {names.NETWORK + name: value for name, value in engine.replicated_network().items()}
        replicated |= {names.OPTIMIZER + name: value for name, value in engine.replicated_optimizer().items()}
        replicated |= {names.LAST_FINITE + name: value for name, value in engine.last_finite_statistics().items()}
        return Content(replicated, own, {"loss_scale": engine.loss_scale()})

    def load(self, saved: Checkpoint) -> None:
        """From any engine and any number of ranks."""
        world, engine = self._world, self._engine
        own_rank = world.rank if saved.ranks == world.size else None  # otherwise statistics become the mean
        network = world.on_all_ranks(lambda: saved.section(names.NETWORK) | saved.statistics(own_rank))
        last_finite = world.on_all_ranks(lambda: saved.section(names.LAST_FINITE))
        optimizer = world.on_all_ranks(lambda: saved.section(names.OPTIMIZER) if self._load_optimizer else {})
        try:  # these are collective themselves, and fail in the same way on every rank
            engine.load_network_state(network, last_finite)
            engine.load_optimizer_state(optimizer)
        except DataError as error:
            raise CollectiveError(f"{saved.folder}: {error}") from None
        engine.load_loss_scale(saved.index.about.get("loss_scale", {}))


class AverageSection:
    """The moving average of the weights."""

    def __init__(self, average: WeightAverage, world: World) -> None:
        self._average, self._world = average, world

    def save(self) -> Content:
        """The weights, which are identical on every rank, and this rank's batch statistics."""
        rank, average = self._world.rank, self._average
        own = {
            names.statistics(rank, names.AVERAGE + name): Fragment.full(value)
            for name, value in average.statistics.items()
        }
        return Content({names.AVERAGE + name: value for name, value in average.weights.items()}, own)

    def load(self, saved: Checkpoint) -> None:
        """If the checkpoint has none, the average starts from the weights that were loaded."""
        self._world.on_all_ranks(lambda: self._load(saved))

    def _load(self, saved: Checkpoint) -> None:
        weights = saved.section(names.AVERAGE)
        if not weights:
            self._average.reset()
            return
        own_rank = self._world.rank if saved.ranks == self._world.size else None
        try:
            self._average.load(weights, saved.average_statistics(own_rank))
        except (ValueError, RuntimeError) as error:
            raise DataError(f"{saved.folder}: {error}") from None


class MethodSection:
    """The sample tables and the replicated state of the method."""

    def __init__(self, method: Method, world: World, *, same_method: bool = True) -> None:
        """`same_method`: the checkpoint is of a run with this method; otherwise, tables that it lacks start empty."""
        self._method, self._world, self._same_method = method, world, same_method

    def save(self) -> Content:
        """This rank's rows of each table."""
        own = {
            names.table(table, self._world.rank, name): Fragment.full(column)
            for table, rows in self._method.tables().items()
            for name, column in rows.state_dict().items()
        }
        return Content({names.METHOD + name: value for name, value in self._method.state_dict().items()}, own)

    def load(self, saved: Checkpoint) -> None:
        """Rows are resharded for the current number of ranks."""
        world = self._world
        if self._same_method:
            world.on_all_ranks(lambda: self._load_state(saved))
        dropped = world.sum([world.on_all_ranks(lambda: self._load_tables(saved))])[0]
        if dropped and world.rank == 0:
            _logger.warning(
                "%s: its tables have more entries per row than fit here; dropped the %s smallest entries. %s",
                saved.folder, f"{dropped:,.0f}", self._method.dropped_entries_advice,
            )  # fmt: skip

    def _load_state(self, saved: Checkpoint) -> None:
        try:
            self._method.load_state_dict(saved.section(names.METHOD))
        except (KeyError, ValueError, RuntimeError) as error:
            raise DataError(f"{saved.folder}: the state of the method does not fit: {error}") from None

    def _load_tables(self, saved: Checkpoint) -> int:
        """Load this rank's rows of each table; returns how many entries did not fit."""
        dropped = 0
        for name, table in self._method.tables().items():
            if name not in saved.table_names and not self._same_method:
                continue
            try:
                dropped += table.load_rows(saved.table(name, table.first, table.stride))
            except (ValueError, RuntimeError) as error:
                raise DataError(f"{saved.folder}: {error}") from None
        return dropped


class ReporterSection:
    """Measurements that are not yet in metrics.jsonl."""

    def __init__(self, reporter: Reporter, world: World) -> None:
        self._reporter, self._world = reporter, world

    def save(self) -> Content:
        """The sums of this rank."""
        own = {names.step_metrics(self._world.rank): Fragment.full(self._reporter.state())}
        return Content(own=own, about=self._reporter.about())

    def load(self, saved: Checkpoint) -> None:
        """A rank's own sums or, if the number of ranks has changed, all of them on rank 0."""
        world = self._world
        sums = world.on_all_ranks(lambda: saved.step_metrics(world.rank, world.size))
        self._reporter.load_state(sums, saved.index.about)


class ProgressSection:
    """Step, best network, counters."""

    def __init__(self, progress: Progress, *, same_run: bool = True) -> None:
        self._progress, self._same_run = progress, same_run

    def save(self) -> Content:
        """All of it is JSON."""
        return Content(about=self._progress.state())

    def load(self, saved: Checkpoint) -> None:
        """The best score of another run is not carried over."""
        self._progress.load_state(saved.index.about, same_run=self._same_run)


def sections_of(
    session: Session,
    progress: Progress,
    reporter: Reporter,
    *,
    load_optimizer: bool = True,
    same_method: bool = True,
    same_run: bool = True,
) -> tuple[Section, ...]:
    """All sections of a run. The options say what a checkpoint to be loaded has in common with this run."""
    world = session.world
    return (
        EngineSection(session.engine, world, load_optimizer=load_optimizer),
        *([] if session.average is None else [AverageSection(session.average, world)]),
        MethodSection(session.method, world, same_method=same_method),
        ReporterSection(reporter, world),
        ProgressSection(progress, same_run=same_run),
    )
