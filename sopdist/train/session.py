"""A session: everything that the loop needs, put together from a config, with every mistake found before the first
step and told by all ranks as one."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

from ..config import ConfigError, to_tree
from ..data.augment.policy import Policy
from ..data.augment.recipes import find_recipe
from ..data.errors import DataError
from ..data.plan import rank_columns
from ..data.settings import DataSettings
from ..data.stream import Stream
from ..models import make_model
from ..noise.exchange import ExchangeStats
from ..objectives import Objective, make_objective
from .clock import Clock
from .config import Config
from .engine import Engine
from .evaluate import close_all, open_evaluations
from .journal import Journal
from .optim import make_optimizer
from .preemption import Requests
from .run_folder import find_run, lock_run, open_run
from .settings import LogSettings
from .tally import Tally
from .world import World


@dataclass(frozen=True)
class Claim:
    """A run's folder that no other process works on, until the lock is closed."""

    folder: Path
    lock: IO[str] | None  # rank 0 holds it

    def close(self) -> None:
        """Let others have it."""
        if self.lock is not None:
            self.lock.close()


@dataclass
class Session:
    """The parts of a run on this rank."""

    config: Config
    world: World
    folder: Path
    stream: Stream
    evaluations: dict[str, Stream]
    engine: Engine
    objective: Objective
    truth: Tensor | None  # (N,) on the device: the clean labels, -1 where unknown, if there are any
    journal: Journal | None  # rank 0 writes it
    clock: Clock
    tally: Tally
    requests: Requests
    claim: Claim  # of the run's folder
    step: int = 0  # optimizer steps done
    best: float = -1.0  # top-1 of the best network so far
    best_step: int = -1  # and after which step that was
    exchanged: ExchangeStats = field(default_factory=ExchangeStats)  # as it was last told
    nonfinite_streak: int = 0  # steps in a row, up to now, with samples that are not finite
    unreadable: int = 0  # samples of all ranks in earlier epochs
    unreadable_before: int = 0  # samples of this rank before the run was resumed
    failed_saves: int = 0
    network_lost: bool = False  # the network of the last step could not be saved
    carried_samples: int = 0  # of this rank, in the tally since before the run was resumed
    fingerprint: dict[str, Any] = field(default_factory=dict)  # made when it is first needed
    started: float = 0.0

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        steps = self.config.train.epochs * self.stream.steps
        return min(steps, self.config.train.max_steps or steps)

    def unreadable_here(self) -> int:
        """Samples of this rank that could not be read so far."""
        return self.unreadable_before + self.stream.stats().bad

    def close(self) -> None:
        """Stop all threads and close all files; nothing is sent to other ranks."""
        self.stream.close()
        close_all(self.evaluations)
        self.claim.close()


def claim_run(config: Config, world: World, *, resume: bool) -> Claim:
    """Make the run's folder, if it is not there, and lock it. Collective."""
    folder = Path(world.on_first(lambda: str(find_run(config, resume=resume))))
    return Claim(folder, world.agree(lambda: lock_run(folder) if world.rank == 0 else None))


def open_session(config: Config, world: World, requests: Requests, claim: Claim) -> Session:
    """Put everything together; whatever is wrong on any rank, all ranks raise the same, and the claim is given up."""
    with ExitStack() as opened:
        opened.callback(claim.close)
        data = data_for_rank(config.data, world)
        stream = world.agree(lambda: _open_stream(config, data, world))
        opened.callback(stream.close)
        classes = stream.split.manifest.classes
        batch = config.evaluate.batch or config.train.batch
        evaluations = world.agree(lambda: open_evaluations(config.evaluate, data, classes, batch, world))
        opened.callback(close_all, evaluations)
        model = world.agree(lambda: _make_model(config, stream))
        # Not inside of `agree`: it talks to other ranks itself, and must not begin if one of them cannot. What it
        # refuses, it refuses on all of them.
        engine = _make_engine(config, world, model)
        group = world.new_group()
        sizes = {"samples": len(stream.split), "classes": len(classes), "seed": config.run.seed}
        objective = world.agree(lambda: make_objective(config.objective, **sizes, device=world.device, group=group))
        truth = world.agree(lambda: _truth(stream, config.log.clean, world.device))
        opened.pop_all()
    return Session(
        config, world, claim.folder, stream, evaluations, engine, objective, truth,
        journal=None, clock=Clock(), tally=Tally(world.device), requests=requests, claim=claim, started=time.time(),
    )  # fmt: skip


def _open_stream(config: Config, data: DataSettings, world: World) -> Stream:
    strong = Policy() if config.objective.consistency > 0 else None
    stream = Stream(data, config.train.batch, config.run.seed, rank=world.rank, world_size=world.size, strong=strong)
    if stream.steps < 1:
        classes, balanced = len(stream.split.manifest.classes), config.data.balanced_per_epoch
        stream.close()
        raise ConfigError(f"data.balanced_per_epoch = {balanced}: fewer than one sample for each of {classes} classes")
    return stream


def begin_record(session: Session, *, resume: bool) -> None:
    """Write the config and open the journal. Collective; last, so that a start that fails leaves an older run alone."""
    session.journal = session.world.agree(lambda: _open_journal(session, resume) if session.world.rank == 0 else None)


def _open_journal(session: Session, resume: bool) -> Journal:
    open_run(session.config, resume=resume)
    config, classes = session.config, session.stream.split.manifest.classes
    return Journal(
        session.folder, config.log, to_tree(config), session.total_steps, config.run.name, class_names=classes
    )


def data_for_rank(data: DataSettings, world: World) -> DataSettings:
    """Decode with this rank's share of the cores, and on its GPU."""
    threads = data.threads or max(1, data.usable_threads() // world.local_size)
    on_gpu = world.device.type == "cuda" and data.device is None and data.backend != "cpu"
    return replace(data, threads=threads, device=world.device.index if on_gpu else data.device)


def _make_model(config: Config, stream: Stream) -> nn.Module:
    recipe = find_recipe(config.data.recipe)
    torch.manual_seed(config.run.seed)  # the same weights on every rank
    classes = len(stream.split.manifest.classes)
    return make_model(config.model, channels=1 if recipe.grey else 3, size=recipe.size, classes=classes)


def _make_engine(config: Config, world: World, model: nn.Module) -> Engine:
    columns = rank_columns(config.train.batch, world.rank, world.size)
    return Engine(
        world,
        config.engine,
        model,
        make_optimizer(config.optim, model),
        accumulate=config.train.accumulate,
        clip=config.train.clip,
        batch=-(-(columns.stop - columns.start) // config.train.accumulate),
    )


def _truth(stream: Stream, name: str, device: torch.device) -> Tensor | None:
    """The label set of the truth, if the split has it. One that is named in the config must be there."""
    try:
        labels = stream.split.labels(name).labels
    except DataError:
        if name != LogSettings().clean or name in stream.split.store.list_labels():
            raise
        return None
    return torch.from_numpy(labels.astype("int64")).to(device)
