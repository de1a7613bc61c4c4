"""What a run will take, by arithmetic alone: steps, bytes of the noise table, of the exchange, of the network's engine.

Nothing is read and nothing is built here: the sizes of the data and of the network come in as numbers, so any world
size can be asked about on any machine.

Two ranks, train.batch = 5, 12 samples of 3 classes in a dense table: 3 steps an epoch; rank 0 computes 2 samples of a
step, rank 1 the other 3; each owns 6 rows of 28 bytes; half of a step's samples, 2.5, are owned by the other rank, so
2.5 x 16 bytes of rows go there and 2.5 x 20 bytes of facts come back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ..config import ConfigError
from ..data.plan import rank_columns
from ..noise.exchange import FACT_WIRE_BYTES, row_wire_bytes
from ..noise.rates import Forecast, Rates, make_rates
from ..noise.rows import Layout, choose_layout, row_bytes
from ..objectives.settings import ObjectiveSettings
from .acceleration import resolve_kind
from .config import Config
from .optim import learning_rate
from .settings import OptimSettings

_FLOAT = 4  # bytes: weights, gradients and optimizer state are float32 whatever engine.precision computes in


@dataclass(frozen=True)
class DataSizes:
    """What must be known of the data."""

    samples: int
    classes: int
    epoch_samples: int  # seen in an epoch: all, or those of data.balanced_per_epoch
    evaluation: Mapping[str, int | None]  # samples of each split of evaluate.splits; none: not known


@dataclass(frozen=True)
class NetworkSizes:
    """What must be known of the network."""

    parameters: int
    trained: int  # of these
    nbytes: int  # of parameters and buffers


@dataclass(frozen=True)
class Steps:
    """How long the run is."""

    epoch: int
    total: int
    epochs: float  # that total comes to: train.max_steps may end a run early
    last: int  # samples of an epoch's last step


@dataclass(frozen=True)
class Share:
    """How many ranks compute how many samples of a step."""

    ranks: int
    samples: int
    piece: int  # samples that go through the network at a time


@dataclass(frozen=True)
class Table:
    """The noise table."""

    layout: Layout
    row_bytes: int
    nbytes: int  # on all ranks together
    rank_bytes: int  # on the rank that has most


@dataclass(frozen=True)
class Traffic:
    """What the exchange sends. Only samples whose owner is another rank travel, so a step's bytes are a mean."""

    travelling: float  # share of the samples
    row_bytes: int  # of a travelling sample: its row, from the owner
    fact_bytes: int  # of a travelling sample: what the owner is told
    step_bytes: float  # there and back, over all ranks
    rank_bytes: float  # of that, sent by one rank
    of_dense: float  # against dense rows there and back


@dataclass(frozen=True)
class Rate:
    """Where the learning rate changes its course."""

    step: int
    lr: float
    event: str


@dataclass(frozen=True)
class Evaluation:
    """One split that is evaluated."""

    name: str
    samples: int | None
    steps: int | None


@dataclass(frozen=True)
class Engine:
    """Bytes of the network on one rank. Activations and buffers of communication come on top."""

    name: str
    weights: int
    gradients: int
    optimizer: int

    @property
    def nbytes(self) -> int:
        """All three together."""
        return self.weights + self.gradients + self.optimizer


def steps_of(config: Config, data: DataSizes) -> Steps:
    """Optimizer steps of an epoch and of the run."""
    train = config.train
    epoch = -(-data.epoch_samples // train.batch)
    total = min(epoch * train.epochs, train.max_steps or epoch * train.epochs)
    return Steps(epoch, total, total / epoch, data.epoch_samples - (epoch - 1) * train.batch)


def check_ranks(config: Config, ranks: int) -> None:
    """Can the config be run by so many ranks?"""
    batch, evaluation = config.train.batch, config.evaluate.batch or config.train.batch
    if ranks > batch:
        raise ConfigError(
            f"train.batch = {batch}: no sample a step for some of {ranks} ranks; raise it to {ranks} or more, "
            f"or take {batch} ranks or fewer"
        )
    if config.evaluate.splits and ranks > evaluation:
        raise ConfigError(f"evaluate.batch = {evaluation}: no sample at a time for some of {ranks} ranks; raise it")
    resolve_kind(config.engine, ranks)
    fewest = batch // ranks
    if fewest < config.train.accumulate:
        raise ConfigError(
            f"train.accumulate = {config.train.accumulate}: some of {ranks} ranks have {fewest} samples of a step, "
            f"which cannot be cut into more pieces; train.batch is {batch}"
        )


def shares_of(config: Config, ranks: int) -> list[Share]:
    """How a step's samples are dealt to the ranks: equal parts, or two kinds that differ by one."""
    spans = [rank_columns(config.train.batch, rank, ranks) for rank in range(ranks)]
    widths = [span.stop - span.start for span in spans]
    pieces = config.train.accumulate
    return [Share(widths.count(width), width, -(-width // pieces)) for width in sorted(set(widths), reverse=True)]


def table_of(objective: ObjectiveSettings, data: DataSizes, ranks: int) -> Table | None:
    """The noise table; plain cross-entropy has none."""
    if objective.name == "ce":
        return None
    slots = min(objective.slots, data.classes)
    layout = objective.layout
    if layout == "auto":
        layout = choose_layout(data.samples, data.classes, objective.slots)
    a_row = row_bytes(layout, data.classes, slots)
    return Table(layout, a_row, data.samples * a_row, -(-data.samples // ranks) * a_row)


def traffic_of(config: Config, data: DataSizes, table: Table | None, ranks: int) -> Traffic | None:
    """The exchange; one rank has none."""
    if table is None or ranks == 1:
        return None
    travelling = (ranks - 1) / ranks
    row = row_wire_bytes(table.layout, data.classes, config.objective.slots)
    step = config.train.batch * travelling * (row + FACT_WIRE_BYTES)
    dense = 2 * row_wire_bytes("dense", data.classes)
    return Traffic(travelling, row, FACT_WIRE_BYTES, step, step / ranks, (row + FACT_WIRE_BYTES) / dense)


def rates_of(objective: ObjectiveSettings, lr: float) -> Rates:
    """The rates of u and v that the objective asks for; `lr` is what the variant `paper` multiplies its own with."""
    given = {"visits": objective.visits, "alpha_u": objective.alpha_u, "alpha_v": objective.alpha_v}
    given |= {"lr_u": objective.lr_u, "lr_v": objective.lr_v, "batch_size": objective.lr_batch}
    given["tau"] = lr if objective.variant == "paper" else None
    try:
        return make_rates(objective.variant, {name: value for name, value in given.items() if value is not None})
    except ValueError as error:
        raise ConfigError(f"objective: {error}") from None


def activation_of(config: Config, data: DataSizes, steps: Steps) -> Forecast | None:
    """After how many visits a label is explained away, and how many visits of a sample the run makes."""
    if config.objective.name == "ce":
        return None
    rates = rates_of(config.objective, config.optim.lr)
    return Forecast(rates.visits_to_activate(), steps.epochs * data.epoch_samples / data.samples, rates)


def course_of(optim: OptimSettings, steps: Steps) -> list[Rate]:
    """Where the learning rate begins, turns and ends, in steps."""
    warm = optim.warmup_epochs * steps.epoch
    events = {0: "warm-up begins" if warm else "start"}
    if warm:
        events[math.ceil(warm)] = "after the warm-up"
    if optim.schedule == "multistep":
        events |= {round(milestone * steps.epoch): f"epoch {milestone:g}" for milestone in optim.milestones}
    events[steps.total - 1] = "last step"
    return [
        Rate(step, learning_rate(optim, step, steps.epoch, steps.total), event)
        for step, event in sorted(events.items())
        if step < steps.total
    ]


def evaluations_of(config: Config, data: DataSizes) -> list[Evaluation]:
    """The splits that are evaluated, and in how many steps."""
    batch = config.evaluate.batch or config.train.batch
    return [
        Evaluation(name, samples, None if samples is None else -(-samples // batch))
        for name, samples in data.evaluation.items()
    ]


def engine_of(config: Config, network: NetworkSizes, ranks: int) -> Engine:
    """Bytes of weights, gradients and optimizer state on the rank that has most.

    ZeRO 1 and 2 keep a second copy of the weights of their partition, which the optimizer works on.
    """
    zero = config.engine.zero
    kind = resolve_kind(config.engine, ranks)
    name = f"deepspeed, ZeRO {zero}" if kind == "deepspeed" else kind
    whole, part = network.trained, -(-network.trained // ranks)
    copies = 1 if zero in (1, 2) else 0
    fixed = network.nbytes - _FLOAT * whole
    return Engine(
        name,
        weights=fixed + _FLOAT * (part if zero == 3 else whole),
        gradients=_FLOAT * (part if zero >= 2 else whole),
        optimizer=_FLOAT * (part if zero else whole) * (_optimizer_floats(config.optim) + copies),
    )


def checkpoint_bytes(config: Config, network: NetworkSizes, table: Table | None) -> int:
    """One checkpoint, whatever the number of ranks: network, optimizer state, noise table."""
    return network.nbytes + _FLOAT * network.trained * _optimizer_floats(config.optim) + (table.nbytes if table else 0)


def _optimizer_floats(optim: OptimSettings) -> int:
    """Numbers that the optimizer keeps for each weight."""
    if optim.name == "adamw":
        return 2
    return 1 if optim.momentum else 0
