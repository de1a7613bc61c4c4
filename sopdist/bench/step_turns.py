"""Work of the ranks of `sopdist bench step`: training steps with the same calls as in the training loop.

One engine takes all kinds of steps in turn, so that they differ only in the method. The images are random and in
memory: `bench input` measures the input pipeline.
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
from ..methods import Method, MethodSettings, Setup, make_method
from ..methods.ce import CESettings
from ..methods.sop import SOPSettings
from ..models import make_model
from ..models.settings import ModelSettings
from ..noise.rows import Layout, row_wire_bytes
from ..train.distributed.world import World
from ..train.engine import Engine, make_engine
from ..train.optim import make_optimizer
from ..train.settings import EngineSettings, OptimSettings
from .timing import synchronize, take_turns

CE, AHEAD, ON_REQUEST = "CE", "SOP, rows ahead", "SOP, rows on request"
ALL_RANKS = "all ranks"  # the other candidates of `alone` are thread counts

_PIXELS = 32
_IMAGE_POOL = 4  # batches of images
_OPTIM = OptimSettings(lr=1e-3)
_STEPS = 2  # per turn


@dataclass(frozen=True)
class Sizes:
    """Sizes of one run."""

    network: str
    batch: int  # global batch size
    samples: int  # rows of the noise table
    classes: tuple[int, ...]
    seconds: float  # for the turns at one class count
    seconds_alone: float  # for one rank against all ranks
    min_rounds: int


def layout_of(classes: int) -> Layout:
    """The layout with fewer bytes per row on the wire."""
    layouts: tuple[Layout, Layout] = ("dense", "slots")
    return min(layouts, key=lambda layout: row_wire_bytes(layout, classes))


class StepTime(NamedTuple):
    """Seconds of one step on one rank."""

    total: float
    cpu: float  # CPU time of all threads, which depends little on other load on the machine
    method: float  # CPU time in the calls of the method
    blocked: float  # waiting for the exchange
    in_flight: float  # rows and facts between ranks, whether a step waited for them or not


def measure(world: World, sizes: Sizes) -> dict[str, Any]:
    """Turns on this rank: steps at each class count, and steps of one rank alone."""
    threads = torch.get_num_threads()
    cases = {str(classes): _compare_methods(world, sizes, classes) for classes in sizes.classes}
    alone = _compare_with_one_rank(world, sizes, threads)
    return {"device": world.device.type, "threads": threads, "cases": cases, "alone": alone}


def _compare_methods(world: World, sizes: Sizes, classes: int) -> dict[str, list[list[StepTime]]]:
    """Turns of each kind of step."""
    layout, network = layout_of(classes), _network(sizes, classes)
    engine = _engine(world, network, sizes.batch // world.size)
    group = world.new_group()

    def steps(settings: MethodSettings) -> Callable[[], list[StepTime]]:
        return _Steps(world, engine, _start(settings, world, sizes, classes, group), sizes, classes)

    candidates = {
        CE: steps(CESettings()),
        AHEAD: steps(SOPSettings(onset="always", layout=layout)),
        ON_REQUEST: steps(SOPSettings(onset="always", layout=layout, ahead=False)),
    }
    title = f"steps, {classes:,} classes"
    return take_turns(world, candidates, seconds=sizes.seconds, min_rounds=sizes.min_rounds, title=title)


def _start(settings: MethodSettings, world: World, sizes: Sizes, classes: int, group: Any) -> Method:
    method = make_method(settings)
    labels = np.zeros(sizes.samples, np.int64)
    method.start(Setup(sizes.samples, classes, 1, sizes.samples, labels, seed=0, device=world.device, group=group))
    return method


class _Steps:
    """Steps with one method, a turn per call; each turn continues where the previous one stopped."""

    def __init__(self, world: World, engine: Engine, method: Method, sizes: Sizes, classes: int) -> None:
        self.world, self.engine, self.method = world, engine, method
        random = np.random.default_rng(0)  # the same plan on every rank
        usable = sizes.samples // sizes.batch * sizes.batch
        self.plan = random.permutation(sizes.samples)[:usable].reshape(-1, sizes.batch)  # (steps, batch)
        self.labels = torch.from_numpy(random.integers(0, classes, sizes.samples))
        self.columns = rank_columns(sizes.batch, world.rank, world.size)
        self.images = _images(self.columns.stop - self.columns.start, world.rank)
        self.step = 0
        self.method_seconds = 0.0
        method.prefetch(self.plan[0])

    def __call__(self) -> list[StepTime]:
        return [self._timed() for _ in range(_STEPS)]

    def _timed(self) -> StepTime:
        blocked, in_flight = _exchange_times(self.method)
        batch = self._batch()
        self.method_seconds = 0.0
        start, start_cpu = time.perf_counter(), time.process_time()
        self._train(batch)
        synchronize(self.world.device)
        total, cpu = time.perf_counter() - start, time.process_time() - start_cpu
        blocked_now, in_flight_now = _exchange_times(self.method)
        return StepTime(total, cpu, self.method_seconds, blocked_now - blocked, in_flight_now - in_flight)

    def _batch(self) -> Batch:
        index = torch.from_numpy(self.plan[self.step % len(self.plan), self.columns])
        images = self.images[self.step % len(self.images)]
        self.step += 1
        return Batch(images, self.labels[index], index, torch.ones(len(index)))

    def _train(self, batch: Batch) -> None:
        """Take one step as the training loop does."""
        world, engine, method = self.world, self.engine, self.method
        weight = world.start_sum([float(batch.weight.sum())])
        with self._in_method():
            method.prefetch(self.plan[self.step % len(self.plan)])
        here = batch.to(world.device)
        with engine.micro_batch(last=True):
            logits = engine.forward(here.images)
            with self._in_method():
                loss = method.step(lambda _: logits, here).loss  # so that the forward pass is not counted
            engine.backward(loss * (world.size / weight.result()[0]))
        engine.step()
        with self._in_method():
            method.flush()

    @contextmanager
    def _in_method(self) -> Iterator[None]:
        start = time.process_time()
        yield
        self.method_seconds += time.process_time() - start


def _compare_with_one_rank(world: World, sizes: Sizes, threads: int) -> dict[str, list[float]]:
    """Seconds per step of all ranks together, and of rank 0 alone with the full batch while the others wait.

    Rank 0 alone uses the threads of one rank and, on a CPU, also the threads of all ranks.
    """
    classes = sizes.classes[0]
    settings = SOPSettings(layout=layout_of(classes))
    method = _start(settings, world, sizes, classes, world.new_group())
    engine = _engine(world, _network(sizes, classes), sizes.batch // world.size)
    together = _Steps(world, engine, method, sizes, classes)
    group_of_one = distributed.new_group([0])  # a collective call
    alone = _StepsAlone(world, sizes, classes, settings, group_of_one) if world.rank == 0 else None

    def turn_alone(threads_alone: int) -> float:
        if alone is None:
            return 0.0
        torch.set_num_threads(threads_alone)
        seconds = alone()
        torch.set_num_threads(threads)
        return seconds

    candidates: dict[str, Callable[[], float]] = {ALL_RANKS: lambda: sum(step.total for step in together()) / _STEPS}
    for count in {threads, threads * world.size if world.device.type == "cpu" else threads}:
        candidates[str(count)] = lambda count=count: turn_alone(count)  # type: ignore[misc]
    return take_turns(world, candidates, seconds=sizes.seconds_alone, min_rounds=sizes.min_rounds, title="one rank")


class _StepsAlone:
    """Steps with the full batch on one rank, a turn per call: plain PyTorch without communication."""

    def __init__(self, world: World, sizes: Sizes, classes: int, settings: MethodSettings, group: Any) -> None:
        self.device = world.device
        self.network = _network(sizes, classes).to(world.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.optimizer = make_optimizer(_OPTIM, self.network)
        self.method = _start(settings, world, sizes, classes, group)
        self.images = _images(sizes.batch, 0)
        index = torch.arange(sizes.batch)
        self.batches = [Batch(images, index % classes, index, torch.ones(sizes.batch)) for images in self.images]
        self.step = 0

    def __call__(self) -> float:
        """Mean seconds per step."""
        start = time.perf_counter()
        for _ in range(_STEPS):
            batch = self.batches[self.step % len(self.batches)].to(self.device)
            self.step += 1
            loss = self.method.step(self.network, batch).loss / len(batch)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.method.flush()
        synchronize(self.device)
        return (time.perf_counter() - start) / _STEPS


def _network(sizes: Sizes, classes: int) -> nn.Module:
    torch.manual_seed(0)  # the same weights on every rank
    return make_model(ModelSettings(sizes.network), channels=3, size=_PIXELS, classes=classes)


def _engine(world: World, network: nn.Module, batch: int) -> Engine:
    optimizer = make_optimizer(_OPTIM, network)
    engine = make_engine(world, EngineSettings(), network, optimizer, accumulate=1, clip=0.0, batch=batch)
    engine.train()
    return engine


def _images(batch: int, seed: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    shape = (batch, 3, _PIXELS, _PIXELS)
    pool = (torch.randn(shape, generator=random) for _ in range(_IMAGE_POOL))
    return [images.contiguous(memory_format=torch.channels_last) for images in pool]


def _exchange_times(method: Method) -> tuple[float, float]:
    """Seconds blocked and in flight so far."""
    stats = method.exchange_stats()
    return stats.waited, stats.travelled
