"""A session: everything that the loop needs, put together from a config, with every mistake found before the first
step and told by all ranks as one."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from ..config import to_tree
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
from .run_folder import open_run
from .tally import Tally
from .world import TogetherError, World


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
    step: int = 0  # optimizer steps done
    best: float = -1.0  # top-1 of the best network so far
    exchanged: ExchangeStats = field(default_factory=ExchangeStats)  # as it was last told
    failed_saves: int = 0
    started: float = 0.0

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        steps = self.config.train.epochs * self.stream.steps
        return min(steps, self.config.train.max_steps or steps)

    def close(self) -> None:
        """Stop all threads and close all files; nothing is sent to other ranks."""
        self.stream.close()
        close_all(self.evaluations)


def open_session(config: Config, world: World, *, resume: bool) -> Session:
    """Put everything together; whatever is wrong on any rank, all ranks raise the same."""
    folder = Path(world.on_first(lambda: str(open_run(config, resume=resume))))
    data = _for_this_rank(config.data, world)
    strong = Policy() if config.objective.consistency > 0 else None
    stream = world.agree(
        lambda: Stream(data, config.train.batch, config.run.seed, rank=world.rank, world_size=world.size, strong=strong)
    )
    classes = stream.split.manifest.classes
    if stream.steps < 1:  # the same on all ranks
        balanced = config.data.balanced_per_epoch
        raise TogetherError(
            f"data.balanced_per_epoch = {balanced}: fewer than one sample for each of {len(classes)} classes",
            config=True,
        )
    batch = config.evaluate.batch or config.train.batch
    evaluations = world.agree(lambda: open_evaluations(config.evaluate, data, classes, batch, world))
    model = world.agree(lambda: _make_model(config, stream))
    # Not inside of `agree`: it talks to other ranks itself, and must not begin if one of them cannot. What it refuses,
    # it refuses on all of them.
    engine = _make_engine(config, world, model)
    group = world.new_group()
    objective = world.agree(
        lambda: make_objective(
            config.objective,
            samples=len(stream.split),
            classes=len(classes),
            seed=config.run.seed,
            device=world.device,
            group=group,
        )
    )
    truth = _truth(stream, config.log.clean, world.device)
    session = Session(
        config, world, folder, stream, evaluations, engine, objective, truth,
        journal=None, clock=Clock(), tally=Tally(world.device), started=time.time(),
    )  # fmt: skip
    session.journal = world.agree(lambda: _open_journal(session) if world.rank == 0 else None)
    return session


def _open_journal(session: Session) -> Journal:
    config, classes = session.config, session.stream.split.manifest.classes
    return Journal(
        session.folder, config.log, to_tree(config), session.total_steps, config.run.name, class_names=classes
    )


def _for_this_rank(data: DataSettings, world: World) -> DataSettings:
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
    """The label set of the truth, if the split has it."""
    with contextlib.suppress(DataError):
        return torch.from_numpy(stream.split.labels(name).labels.astype("int64")).to(device)
    return None
