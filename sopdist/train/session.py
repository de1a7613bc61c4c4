"""A session: what a run consists of on this rank, built from a config before the first step.

Setup errors are found here and raised identically on every rank. `progress.py` holds the progress of the run.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

from ..data.augment.recipes import find_recipe
from ..data.plan import rank_columns
from ..data.settings import DataSettings
from ..data.stream import Stream
from ..errors import ConfigError, DataError
from ..methods import Method, Setup, make_method
from ..models import make_model
from .between_epochs import BetweenEpochs
from .config import Config
from .distributed.stop_requests import Requests
from .distributed.world import World
from .engine import Engine, make_engine
from .evaluate import close_all, open_evaluations
from .optim import make_optimizer
from .record.run_folder import find_run, lock_run
from .saving.fingerprint import fingerprint_of
from .settings import LogSettings
from .weight_average import WeightAverage


@dataclass(frozen=True)
class RunLock:
    """The folder of a run, and the lock that keeps other processes out until it is closed."""

    folder: Path
    file: IO[str] | None  # held by rank 0

    def close(self) -> None:
        """Release the lock."""
        if self.file is not None:
            self.file.close()


@dataclass(frozen=True)
class Session:
    """The parts of a run on this rank."""

    config: Config
    world: World
    lock: RunLock
    stream: Stream
    evaluations: dict[str, Stream]
    engine: Engine
    method: Method
    average: WeightAverage | None  # of the weights, if `train.ema` is set
    between_epochs: BetweenEpochs
    clean_labels: Tensor | None  # (N,) on the device, -1 where unknown, if the split has them
    requests: Requests
    fingerprint: dict[str, Any]  # what must not change on resume

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return self.lock.folder

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the full run."""
        steps = self.config.train.epochs * self.stream.steps
        return min(steps, self.config.train.max_steps or steps)

    def stage(self, epoch: int) -> tuple[int, int]:
        """The first epoch of the method's stage that this epoch belongs to, and the one after its last."""
        first = 0
        for length in self.method.stages(self.config.train.epochs):
            if epoch < first + length:
                return first, first + length
            first += length
        raise ValueError(f"epoch {epoch} is in no stage of {self.method.name}")

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes."""
        return self.stream.split.manifest.classes

    @property
    def engine_name(self) -> str:
        """How the network is distributed, for users."""
        kind = self.world.kind
        return f"deepspeed, ZeRO {self.config.engine.zero}" if kind == "deepspeed" else kind

    def close(self) -> None:
        """Stop all threads and close all files; sends nothing to other ranks."""
        self.stream.close()
        self.between_epochs.close()
        close_all(self.evaluations)
        self.lock.close()


def lock_run_folder(config: Config, world: World, *, resume: bool) -> RunLock:
    """Create the folder of the run, if it does not exist, and lock it. Collective."""
    folder = Path(world.on_rank0(lambda: str(find_run(config, resume=resume))))
    return RunLock(folder, world.on_all_ranks(lambda: lock_run(folder) if world.rank == 0 else None))


def open_session(config: Config, world: World, requests: Requests, lock: RunLock) -> Session:
    """Build everything. If anything fails on any rank, every rank raises the same error, and the lock is released."""
    method = make_method(config.method)
    with ExitStack() as opened:
        opened.callback(lock.close)
        data = data_for_rank(config.data, world)
        stream = world.on_all_ranks(lambda: _open_stream(config, data, world, method))
        opened.callback(stream.close)
        classes = stream.split.manifest.classes
        batch = config.evaluate.batch or config.train.batch
        evaluations = world.on_all_ranks(lambda: open_evaluations(config.evaluate, data, classes, batch, world))
        opened.callback(close_all, evaluations)
        make_network = partial(_build_network, config, method, len(classes))
        network = world.on_all_ranks(lambda: make_network(config.run.seed))
        # The engine and the method communicate with other ranks themselves, so they must not run in `on_all_ranks`,
        # which would leave the others waiting if one failed. They fail in the same way on every rank.
        engine = _make_engine(config, world, network)
        labels, epochs = stream.labels.labels, config.train.epochs
        group, seed = world.new_group(), config.run.seed
        sizes = len(stream.split), len(classes), epochs, config.train.batch
        method.start(Setup(*sizes, labels, seed, world.device, group))
        average = WeightAverage(engine, config.train.ema) if config.train.ema else None
        fresh = partial(make_network, _seed_of_fresh_network(config.run.seed))
        between_epochs = BetweenEpochs(data, batch, stream, engine, average, method, world, fresh)
        clean = world.on_all_ranks(lambda: _clean_labels(stream, config.log.clean, world.device))
        opened.pop_all()
    fingerprint = fingerprint_of(config, stream, method)
    return Session(
        config, world, lock, stream, evaluations, engine, method, average, between_epochs, clean, requests, fingerprint
    )


def _open_stream(config: Config, data: DataSettings, world: World, method: Method) -> Stream:
    layout = method.batch_layout(config.train.batch)
    stream = Stream(
        data,
        config.train.batch,
        config.run.seed,
        rank=world.rank,
        world_size=world.size,
        views=method.views(),
        leading=layout.leading,
        widest=layout.widest,
    )
    if stream.steps < 1:
        classes, balanced = len(stream.split.manifest.classes), config.data.balanced_per_epoch
        stream.close()
        raise ConfigError(f"data.balanced_per_epoch = {balanced}: fewer than one sample for each of {classes} classes")
    return stream


def data_for_rank(data: DataSettings, world: World) -> DataSettings:
    """Decode with this rank's share of the cores, and on its GPU."""
    threads = data.threads or max(1, data.usable_threads() // world.local_size)
    on_gpu = world.device.type == "cuda" and data.device is None and data.backend != "cpu"
    return replace(data, threads=threads, device=world.device.index if on_gpu else data.device)


def _seed_of_fresh_network(seed: int) -> int:
    """Of a network with other initial weights than those of `seed`."""
    return (seed + 2**62) % 2**63


def _build_network(config: Config, method: Method, classes: int, seed: int) -> nn.Module:
    recipe = find_recipe(config.data.recipe)
    torch.manual_seed(seed)  # the same weights on every rank
    channels = 1 if recipe.grey else 3
    return method.build_network(lambda: make_model(config.model, channels=channels, size=recipe.size, classes=classes))


def _make_engine(config: Config, world: World, network: nn.Module) -> Engine:
    columns = rank_columns(config.train.batch, world.rank, world.size)
    return make_engine(
        world,
        config.engine,
        network,
        make_optimizer(config.optim, network),
        accumulate=config.train.accumulate,
        clip=config.train.clip,
        batch=-(-(columns.stop - columns.start) // config.train.accumulate),
    )


def _clean_labels(stream: Stream, name: str, device: torch.device) -> Tensor | None:
    """The label set with the clean labels, if the split has it. One that is named in the config must exist."""
    try:
        labels = stream.split.labels(name).labels
    except DataError:
        if name != LogSettings().clean or name in stream.split.store.list_labels():
            raise
        return None
    return torch.from_numpy(labels.astype("int64")).to(device)
