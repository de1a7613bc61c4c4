"""What the ranks of `sopdist bench step` do: training steps, put together as the trainer's loop has them.

The same engine takes all kinds of steps in turn, so that they differ in the objective alone. Images are random and lie
in memory: the input pipeline has a bench of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, distributed, nn

from ..data.batch import Batch
from ..data.plan import rank_columns
from ..models import make_model
from ..models.settings import ModelSettings
from ..noise.exchange import row_wire_bytes
from ..noise.rows import Layout
from ..objectives import Objective, ObjectiveSettings, make_objective
from ..train.engine import Engine
from ..train.optim import make_optimizer
from ..train.settings import EngineSettings, OptimSettings
from ..train.world import World
from .turns import take_turns

CE, AHEAD, ASKED = "CE", "SOP, rows ahead", "SOP, rows asked for"
TOGETHER = "all ranks"  # the other candidates of `alone` are numbers of threads

_PIXELS = 32
_IMAGE_POOL = 4  # batches of images
_OPTIM = OptimSettings(lr=1e-3)
_STEPS = 2  # of a turn


@dataclass(frozen=True)
class Sizes:
    """What one run measures."""

    network: str
    batch: int  # of all ranks together
    samples: int  # rows of the noise table
    classes: tuple[int, ...]
    seconds: float  # for the turns at one number of classes
    seconds_alone: float  # for those of one rank against all
    fewest: int  # rounds


def layout_of(classes: int) -> Layout:
    """The layout whose rows are smaller on their way."""
    layouts: tuple[Layout, Layout] = ("dense", "slots")
    return min(layouts, key=lambda layout: row_wire_bytes(layout, classes))


class StepTime(NamedTuple):
    """Seconds of one step on one rank."""

    whole: float
    cpu: float  # of CPU time, of all threads: what others do on the machine counts little here
    objective: float  # of these: in the objective's calls
    waited: float  # stood still for the exchange
    travelled: float  # of rows and facts between ranks, waited for or not


def measure(world: World, sizes: Sizes) -> dict[str, Any]:
    """On one rank: the steps at each number of classes, and those of one rank alone."""
    threads = torch.get_num_threads()
    cases = {str(classes): _compare_objectives(world, sizes, classes) for classes in sizes.classes}
    alone = _compare_with_one_rank(world, sizes, threads)
    return {"device": world.device.type, "threads": threads, "cases": cases, "alone": alone}


def _compare_objectives(world: World, sizes: Sizes, classes: int) -> dict[str, list[list[StepTime]]]:
    """The turns of each kind of step."""
    layout, network = layout_of(classes), _network(sizes, classes)
    engine = _engine(world, network, sizes.batch // world.size)
    group = world.new_group()

    def steps(settings: ObjectiveSettings) -> Callable[[], list[StepTime]]:
        objective = make_objective(
            settings, samples=sizes.samples, classes=classes, seed=0, device=world.device, group=group
        )
        return _Steps(world, engine, objective, sizes, classes)

    candidates = {
        CE: steps(ObjectiveSettings("ce")),
        AHEAD: steps(ObjectiveSettings(layout=layout)),
        ASKED: steps(ObjectiveSettings(layout=layout, ahead=False)),
    }
    title = f"steps, {classes:,} classes"
    return take_turns(world, candidates, seconds=sizes.seconds, fewest=sizes.fewest, title=title)


class _Steps:
    """A turn of steps with one objective; goes on with the next turn where the last one ended."""

    def __init__(self, world: World, engine: Engine, objective: Objective, sizes: Sizes, classes: int) -> None:
        self.world, self.engine, self.objective = world, engine, objective
        random = np.random.default_rng(0)  # the same plan on every rank
        usable = sizes.samples // sizes.batch * sizes.batch
        self.rows = random.permutation(sizes.samples)[:usable].reshape(-1, sizes.batch)  # (steps, batch)
        self.labels = torch.from_numpy(random.integers(0, classes, sizes.samples))
        self.columns = rank_columns(sizes.batch, world.rank, world.size)
        self.images = _images(self.columns.stop - self.columns.start, world.rank)
        self.number = 0
        self.inside = 0.0
        objective.expect(self.rows[0])

    def __call__(self) -> list[StepTime]:
        return [self._timed() for _ in range(_STEPS)]

    def _timed(self) -> StepTime:
        waited, travelled = _exchange_times(self.objective)
        batch = self._batch()
        self.inside = 0.0
        begun, begun_cpu = time.perf_counter(), time.process_time()
        self._step(batch)
        _finish(self.world.device)
        whole, cpu = time.perf_counter() - begun, time.process_time() - begun_cpu
        waited_now, travelled_now = _exchange_times(self.objective)
        return StepTime(whole, cpu, self.inside, waited_now - waited, travelled_now - travelled)

    def _batch(self) -> Batch:
        index = torch.from_numpy(self.rows[self.number % len(self.rows), self.columns])
        images = self.images[self.number % len(self.images)]
        self.number += 1
        return Batch(images, self.labels[index], index, torch.ones(len(index)))

    def _step(self, batch: Batch) -> None:
        """A step of the training loop."""
        world, engine, objective = self.world, self.engine, self.objective
        weight = world.begin_sum([float(batch.weight.sum())])
        with self._in_objective():
            objective.expect(self.rows[self.number % len(self.rows)])
        here = batch.to(world.device)
        with engine.piece(last=True):
            logits = engine.forward(here.images)
            with self._in_objective():
                loss = objective.loss(logits, here, None)
            engine.backward(loss * (world.size / weight.result()[0]))
        engine.step()
        with self._in_objective():
            objective.settle()

    @contextmanager
    def _in_objective(self) -> Iterator[None]:
        begun = time.process_time()
        yield
        self.inside += time.process_time() - begun


def _compare_with_one_rank(world: World, sizes: Sizes, threads: int) -> dict[str, list[float]]:
    """Seconds of a step of all ranks together, and of rank 0 alone with the same batch while the others wait.

    Alone it has the threads of one rank, and, on a CPU, the threads of all.
    """
    classes = sizes.classes[0]
    settings = ObjectiveSettings(layout=layout_of(classes))
    objective = make_objective(
        settings, samples=sizes.samples, classes=classes, seed=0, device=world.device, group=world.new_group()
    )
    engine = _engine(world, _network(sizes, classes), sizes.batch // world.size)
    together = _Steps(world, engine, objective, sizes, classes)
    by_itself = distributed.new_group([0])  # all ranks take part in making it
    alone = _StepsAlone(world, sizes, classes, settings, by_itself) if world.rank == 0 else None

    def turn_alone(threads_alone: int) -> float:
        if alone is None:
            return 0.0
        torch.set_num_threads(threads_alone)
        seconds = alone()
        torch.set_num_threads(threads)
        return seconds

    candidates: dict[str, Callable[[], float]] = {TOGETHER: lambda: sum(step.whole for step in together()) / _STEPS}
    for count in {threads, threads * world.size if world.device.type == "cpu" else threads}:
        candidates[str(count)] = lambda count=count: turn_alone(count)  # type: ignore[misc]
    return take_turns(world, candidates, seconds=sizes.seconds_alone, fewest=sizes.fewest, title="one rank alone")


class _StepsAlone:
    """A turn of steps with the whole batch on one rank: plain torch, as nobody has to be told anything."""

    def __init__(self, world: World, sizes: Sizes, classes: int, settings: ObjectiveSettings, group: Any) -> None:
        self.device = world.device
        self.network = _network(sizes, classes).to(world.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.optimizer = make_optimizer(_OPTIM, self.network)
        self.objective = make_objective(
            settings, samples=sizes.samples, classes=classes, seed=0, device=world.device, group=group
        )
        self.images = _images(sizes.batch, 0)
        index = torch.arange(sizes.batch)
        self.batches = [Batch(images, index % classes, index, torch.ones(sizes.batch)) for images in self.images]
        self.number = 0

    def __call__(self) -> float:
        """Mean seconds of a step."""
        begun = time.perf_counter()
        for _ in range(_STEPS):
            batch = self.batches[self.number % len(self.batches)].to(self.device)
            self.number += 1
            loss = self.objective.loss(self.network(batch.images), batch, None) / len(batch)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.objective.settle()
        _finish(self.device)
        return (time.perf_counter() - begun) / _STEPS


def _network(sizes: Sizes, classes: int) -> nn.Module:
    torch.manual_seed(0)  # the same weights on every rank
    return make_model(ModelSettings(sizes.network), channels=3, size=_PIXELS, classes=classes)


def _engine(world: World, network: nn.Module, batch: int) -> Engine:
    optimizer = make_optimizer(_OPTIM, network)
    engine = Engine(world, EngineSettings(), network, optimizer, accumulate=1, clip=0.0, batch=batch)
    engine.train()
    return engine


def _images(batch: int, seed: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    shape = (batch, 3, _PIXELS, _PIXELS)
    pool = (torch.randn(shape, generator=random) for _ in range(_IMAGE_POOL))
    return [images.contiguous(memory_format=torch.channels_last) for images in pool]


def _exchange_times(objective: Objective) -> tuple[float, float]:
    """Seconds waited and travelled so far."""
    if objective.sop is None or objective.sop.exchange is None:
        return 0.0, 0.0
    stats = objective.sop.exchange.stats()
    return stats.waited, stats.travelled


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
