"""Work of the ranks of `sopdist bench checkpoint`: save the same state in several ways, with training steps around it.

The state is the one that the trainer saves, of a network that has been trained for a step and a large noise table.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checkpoint import names
from ..checkpoint.fragments import Fragment
from ..checkpoint.index import file_of
from ..checkpoint.writing import CheckpointWriter, Staging, save_fragments, start_save
from ..models import make_model
from ..models.settings import ModelSettings
from ..noise import SOP
from ..train.distributed.world import World
from ..train.engine import make_engine
from ..train.optim import make_optimizer
from ..train.saving.saver import fragments_of
from ..train.saving.sections import Content, EngineSection
from ..train.settings import EngineSettings, OptimSettings
from .timing import synchronize, take_turns

BACKGROUND, SYNCHRONOUS, TORCH = "background", "synchronous", "torch.save"
_PIXELS = 32
_STEPS_BEFORE = 2  # training steps before each save, to compare with


@dataclass(frozen=True)
class Sizes:
    """Sizes of one run."""

    folder: str  # for the checkpoints
    network: str
    batch: int  # per rank
    samples: int  # rows of the noise table
    classes: int
    seconds: float
    min_rounds: int


class SaveTime(NamedTuple):
    """Seconds of one save on one rank."""

    blocked: float  # training was blocked
    total: float  # until everything was on disk
    step_before: float  # a training step before the save
    step_during: float  # a training step during the save; 0 if the save blocked training until its end


def measure(world: World, sizes: Sizes) -> dict[str, Any]:
    """Turns of each kind of save on this rank."""
    saves = _Saves(world, sizes)
    candidates: dict[str, Callable[[], SaveTime]] = {
        BACKGROUND: saves.in_background, SYNCHRONOUS: saves.synchronous, TORCH: saves.by_torch,
    }  # fmt: skip
    turns = take_turns(world, candidates, seconds=sizes.seconds, min_rounds=sizes.min_rounds, title="saves")
    return {
        "device": world.device.type,
        "threads": torch.get_num_threads(),
        "bytes": saves.bytes_written,
        "turns": turns,
    }


class _Saves:
    def __init__(self, world: World, sizes: Sizes) -> None:
        self.world, self.folder = world, Path(sizes.folder)
        torch.manual_seed(0)  # the same weights on every rank
        network = make_model(ModelSettings(sizes.network), channels=3, size=_PIXELS, classes=sizes.classes)
        optimizer = make_optimizer(OptimSettings(lr=1e-3), network)
        self.engine = make_engine(
            world, EngineSettings(), network, optimizer, accumulate=1, clip=0.0, batch=sizes.batch
        )
        group = world.new_group()
        self.sop = SOP(sizes.samples, sizes.classes, onset="always", device=world.device, process_group=group)
        self.images = torch.randn(sizes.batch, 3, _PIXELS, _PIXELS, device=world.device)
        self.group, self.staging = world.new_group(for_cpu=True), Staging()
        self.bytes_written = 0  # by this rank, per checkpoint
        self.engine.train()
        self._step()

    def in_background(self) -> SaveTime:
        before = self._prepare()
        done: list[float] = []
        start = time.perf_counter()
        saving = start_save(self._fragments(), self._writer(), self.group, self.staging)
        blocked = time.perf_counter() - start
        saving.add_done_callback(lambda _: done.append(time.perf_counter()))
        during = []
        while self.world.max([float(not saving.done())])[0]:  # all ranks take the same number of steps
            during.append(self._step())
        saving.result()
        self.bytes_written = (self.folder / "checkpoint" / file_of(self.world.rank, self.world.size)).stat().st_size
        return SaveTime(blocked, done[0] - start, before, sum(during) / max(1, len(during)))

    def synchronous(self) -> SaveTime:
        before = self._prepare()
        start = time.perf_counter()
        save_fragments(self._fragments(), self._writer(), self.group)
        seconds = time.perf_counter() - start
        return SaveTime(seconds, seconds, before, 0.0)

    def by_torch(self) -> SaveTime:
        """The common way: rank 0 writes network and optimizer, every rank writes its rows, and all call fsync."""
        before = self._prepare()
        start = time.perf_counter()
        if self.world.rank == 0:
            _write_by_torch(
                self.folder / "state.pt", {**self.engine.replicated_network(), **self.engine.replicated_optimizer()}
            )
        _write_by_torch(self.folder / f"rows-{self.world.rank}.pt", self.sop.table.state_dict())
        self.world.barrier()
        seconds = time.perf_counter() - start
        return SaveTime(seconds, seconds, before, 0.0)

    def _prepare(self) -> float:
        """Take a few steps and delete the previous checkpoint; returns the seconds per step."""
        seconds = sum(self._step() for _ in range(_STEPS_BEFORE)) / _STEPS_BEFORE
        if self.world.rank == 0:
            shutil.rmtree(self.folder / "checkpoint", ignore_errors=True)
        self.world.barrier()
        return seconds

    def _step(self) -> float:
        start = time.perf_counter()
        with self.engine.micro_batch(last=True):
            self.engine.backward(self.engine.forward(self.images).logsumexp(dim=1).mean())
        self.engine.step()
        synchronize(self.world.device)
        return time.perf_counter() - start

    def _fragments(self) -> dict[str, Any]:
        rank, ranks = self.world.rank, self.world.size
        columns = self.sop.table.state_dict().items()
        rows = Content(own={names.table("noise", rank, name): Fragment.full(column) for name, column in columns})
        return fragments_of([EngineSection(self.engine, self.world).save(), rows], rank, ranks)

    def _writer(self) -> CheckpointWriter:
        about = {"step": 1, "ranks": self.world.size, "best": 0.0, "engine": "ddp", "fingerprint": {}, "config": {}}
        return CheckpointWriter(self.folder / "checkpoint", self.world.rank, self.world.size, about)


def _write_by_torch(path: Path, state: dict[str, Tensor]) -> None:
    with path.open("wb") as file:
        torch.save({name: tensor.cpu() for name, tensor in state.items()}, file)
        file.flush()
        os.fsync(file.fileno())
