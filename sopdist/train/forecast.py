"""Cost of a run: steps, and bytes of the sample tables, the exchange and the engine.

Pure arithmetic on the given sizes of data and network: it reads no files and builds no network, so it works for any
world size on any machine.

Two ranks, train.batch = 5, 12 samples of 3 classes in a dense noise table: 3 steps per epoch; rank 0 computes 2 samples
of a step, rank 1 the other 3; each owns 6 rows of 32 bytes; half of a step's samples, 2.5 on average, are owned by the
other rank, so 2.5 x 16 bytes of rows are sent and 2.5 x 24 bytes of facts return.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..data.plan import rank_columns
from ..errors import ConfigError
from ..methods import Cost, Method, Outlook, make_method
from .config import Config
from .distributed.accelerator import resolve_kind
from .optim import decay_start, learning_rate
from .settings import OptimSettings

_FLOAT = 4  # bytes: weights, gradients and optimizer state are float32 for every engine.precision


@dataclass(frozen=True)
class DataSizes:
    """Sizes of the data."""

    samples: int
    classes: int
    epoch_samples: int  # per epoch: all, or those of data.balanced_per_epoch
    evaluation: Mapping[str, int | None]  # samples of each split of evaluate.splits; None: unknown


@dataclass(frozen=True)
class NetworkSizes:
    """Sizes of the network."""

    parameters: int
    trained: int  # trainable parameters
    nbytes: int  # of parameters and buffers


@dataclass(frozen=True)
class Steps:
    """Length of the run."""

    epoch: int
    total: int
    epochs: float  # that `total` steps amount to: train.max_steps may stop a run early
    last: int  # samples in the last step of an epoch
    leading: int  # samples of a step that an epoch has only once; less than train.batch if batches have several parts


@dataclass(frozen=True)
class Share:
    """A group of ranks that compute the same number of samples per step."""

    ranks: int
    samples: int
    micro_batch: int  # samples per forward pass


@dataclass(frozen=True)
class Table:
    """A sample table of the method."""

    name: str
    layout: str
    row_bytes: int
    nbytes: int  # over all ranks
    rank_bytes: int  # on the rank with the most rows


@dataclass(frozen=True)
class Traffic:
    """Data sent by the exchange. Only rows owned by another rank are sent, so bytes per step are a mean."""

    travelling: float  # fraction of the samples whose row is sent
    row_bytes: int  # per row sent: the row, from its owner
    fact_bytes: int  # per row sent: the facts, back to the owner
    step_bytes: float  # both directions, over all ranks
    rank_bytes: float  # of that, sent by one rank
    of_dense: float  # relative to dense rows in both directions


@dataclass(frozen=True)
class Rate:
    """The learning rate at one step of the schedule."""

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
    """Bytes of the network on one rank, without activations and communication buffers."""

    name: str
    weights: int
    gradients: int
    optimizer: int

    @property
    def nbytes(self) -> int:
        """The sum of all three."""
        return self.weights + self.gradients + self.optimizer


def steps_of(config: Config, data: DataSizes) -> Steps:
    """Optimizer steps per epoch and of the run."""
    train = config.train
    leading = make_method(config.method).batch_layout(train.batch).leading
    epoch = -(-data.epoch_samples // leading)
    total = min(epoch * train.epochs, train.max_steps or epoch * train.epochs)
    return Steps(epoch, total, total / epoch, data.epoch_samples - (epoch - 1) * leading, leading)


def check_ranks(config: Config, ranks: int) -> None:
    """ConfigError if the config cannot run on this many ranks."""
    batch, evaluation = config.train.batch, config.evaluate.batch or config.train.batch
    if ranks > batch:
        raise ConfigError(
            f"train.batch = {batch}: less than one sample per step for some of {ranks} ranks; raise it to {ranks} or "
            f"more, or use at most {batch} ranks"
        )
    if config.evaluate.splits and ranks > evaluation:
        raise ConfigError(f"evaluate.batch = {evaluation}: less than one sample for some of {ranks} ranks; raise it")
    resolve_kind(config.engine, ranks)
    fewest = batch // ranks
    if fewest < config.train.accumulate:
        raise ConfigError(
            f"train.accumulate = {config.train.accumulate}: some of {ranks} ranks have {fewest} samples per step, "
            f"which cannot be split into more micro-batches; train.batch is {batch}"
        )


def shares_of(config: Config, ranks: int) -> list[Share]:
    """How the samples of a step, at most, are split over ranks: equal parts, or two sizes that differ by one."""
    widest = make_method(config.method).batch_layout(config.train.batch).widest
    spans = [rank_columns(widest, rank, ranks) for rank in range(ranks)]
    widths = [span.stop - span.start for span in spans]
    micro_batches = config.train.accumulate
    return [
        Share(widths.count(width), width, -(-width // micro_batches)) for width in sorted(set(widths), reverse=True)
    ]


def tables_of(cost: Cost, data: DataSizes, ranks: int) -> list[Table]:
    """The sample tables of the method."""
    rows = -(-data.samples // ranks)
    return [
        Table(table.name, table.layout, table.row_bytes, data.samples * table.row_bytes, rows * table.row_bytes)
        for table in cost.tables
    ]


def traffic_of(config: Config, cost: Cost, ranks: int) -> Traffic | None:
    """The exchange of all tables together; None on one rank, or without tables."""
    if not cost.tables or ranks == 1:
        return None
    travelling = (ranks - 1) / ranks
    sent = sum(table.sent_bytes for table in cost.tables)
    returned = sum(table.returned_bytes for table in cost.tables)
    dense = sum(table.dense_bytes for table in cost.tables)
    widest = make_method(config.method).batch_layout(config.train.batch).widest
    step = widest * travelling * (sent + returned)
    return Traffic(travelling, sent, returned, step, step / ranks, (sent + returned) / dense)


def outlook_of(config: Config, method: Method, data: DataSizes, steps: Steps) -> Outlook | None:
    """Whether the method can act on a label within the visits that a sample gets during the run."""
    return method.outlook(steps.epochs * data.epoch_samples / data.samples, config.optim.lr)


def schedule_of(config: Config, steps: Steps) -> list[Rate]:
    """The learning rate at the start, at each change, and at the end; it starts again with each stage of the method."""
    optim, rates, begun = config.optim, list[Rate](), 0
    first, total = 0, steps.total  # of the stage in which the run ends
    for epochs in make_method(config.method).stages(config.train.epochs):
        if begun >= steps.total:
            break
        first, total = begun, min(epochs * steps.epoch, steps.total - begun)
        start = "start" if not first else f"the schedule restarts, epoch {first / steps.epoch:g}"
        rates += [
            Rate(first + step, learning_rate(optim, step, steps.epoch, total), event)
            for step, event in sorted(_changes(optim, steps.epoch, start).items())
            if step < total - 1
        ]
        begun += epochs * steps.epoch
    last = steps.total - 1
    return [*rates, Rate(last, learning_rate(optim, last - first, steps.epoch, total), "last step")]


def _changes(optim: OptimSettings, steps: int, start: str) -> dict[int, str]:
    """The steps of a stage at which something happens to the learning rate, and what."""
    warm = optim.warmup_epochs * steps
    events = {0: "warm-up starts" if warm else start}
    if warm:
        events[math.ceil(warm)] = "after warm-up"
    if optim.schedule == "multistep":
        events |= {round(milestone * steps): f"epoch {milestone:g}" for milestone in optim.milestones}
    if optim.schedule == "linear" and optim.decay_from:
        events[decay_start(optim, steps)] = "begins to fall"
    return events


def evaluations_of(config: Config, data: DataSizes) -> list[Evaluation]:
    """The evaluation splits, and their steps."""
    batch = config.evaluate.batch or config.train.batch
    return [
        Evaluation(name, samples, None if samples is None else -(-samples // batch))
        for name, samples in data.evaluation.items()
    ]


def engine_of(config: Config, network: NetworkSizes, ranks: int) -> Engine:
    """Bytes of weights (and their average), gradients and optimizer state on the rank with the most.

    ZeRO 1 and 2 keep a second copy of the weights in their partition, which the optimizer updates.
    """
    zero = config.engine.zero
    kind = resolve_kind(config.engine, ranks)
    name = f"deepspeed, ZeRO {zero}" if kind == "deepspeed" else kind
    full, part = network.trained, -(-network.trained // ranks)
    copies = 1 if zero in (1, 2) else 0
    fixed = network.nbytes - _FLOAT * full
    return Engine(
        name,
        weights=fixed + _FLOAT * (part if zero == 3 else full) + _average_bytes(config, network),
        gradients=_FLOAT * (part if zero >= 2 else full),
        optimizer=_FLOAT * (part if zero else full) * (_optimizer_floats(config.optim) + copies),
    )


def checkpoint_bytes(config: Config, network: NetworkSizes, tables: Sequence[Table]) -> int:
    """Bytes of one checkpoint, for any number of ranks: network, optimizer state, sample tables."""
    rows = sum(table.nbytes for table in tables)
    optimizer = _FLOAT * network.trained * _optimizer_floats(config.optim)
    return network.nbytes + _average_bytes(config, network) + optimizer + rows


def _average_bytes(config: Config, network: NetworkSizes) -> int:
    """Of the moving average of the weights."""
    return network.nbytes if config.train.ema else 0


def _optimizer_floats(optim: OptimSettings) -> int:
    """Floats of optimizer state per weight."""
    if optim.name == "adamw":
        return 2
    return 1 if optim.momentum else 0
