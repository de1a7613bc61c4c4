"""What the ranks of `sopdist bench checkpoint` do: save the same state in several ways, and train around that.

The pieces are those that the trainer saves, of a network that has taken steps and a noise table of many rows.
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

from ..checkpoint.index import file_of
from ..checkpoint.writing import CheckpointWriter, Staging, begin_save, save_pieces
from ..models import make_model
from ..models.settings import ModelSettings
from ..noise import SOP
from ..train.checkpoint import pieces_of
from ..train.engine import Engine
from ..train.optim import make_optimizer
from ..train.settings import EngineSettings, OptimSettings
from ..train.world import World
from .turns import take_turns

BACKGROUND, NOW, TORCH = "in the background", "at once", "torch.save"
_PIXELS = 32
_IDLE_STEPS = 2  # before each save, to compare with


@dataclass(frozen=True)
class Sizes:
    """What one run measures."""

    folder: str  # where checkpoints are written
    network: str
    batch: int  # of a rank
    samples: int  # rows of the noise table
    classes: int
    seconds: float
    fewest: int  # rounds


class SaveTime(NamedTuple):
    """Seconds of one save on one rank."""

    stood_still: float  # training could not go on
    whole: float  # until everything was on the disk
    step_before: float  # of training, while nothing is saved
    step_meanwhile: float  # of training, while the save goes on; 0 if it stood still


def measure(world: World, sizes: Sizes) -> dict[str, Any]:
    """On one rank: the turns of each way to save."""
    saves = _Saves(world, sizes)
    candidates: dict[str, Callable[[], SaveTime]] = {
        BACKGROUND: saves.in_background, NOW: saves.at_once, TORCH: saves.by_torch,
    }  # fmt: skip
    turns = take_turns(world, candidates, seconds=sizes.seconds, fewest=sizes.fewest, title="saves")
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
        self.engine = Engine(world, EngineSettings(), network, optimizer, accumulate=1, clip=0.0, batch=sizes.batch)
        self.sop = SOP(sizes.samples, sizes.classes, device=world.device, process_group=world.new_group())
        self.images = torch.randn(sizes.batch, 3, _PIXELS, _PIXELS, device=world.device)
        self.group, self.staging = world.new_group(of_hosts=True), Staging()
        self.bytes_written = 0  # by this rank, of a checkpoint
        self.engine.train()
        self._step()

    def in_background(self) -> SaveTime:
        before = self._idle()
        done: list[float] = []
        begun = time.perf_counter()
        saving = begin_save(self._pieces(), self._writer(), self.group, self.staging)
        stood_still = time.perf_counter() - begun
        saving.add_done_callback(lambda _: done.append(time.perf_counter()))
        meanwhile = []
        while self.world.max([float(not saving.done())])[0]:  # all ranks take the same number of steps
            meanwhile.append(self._step())
        saving.result()
        self.bytes_written = (self.folder / "checkpoint" / file_of(self.world.rank, self.world.size)).stat().st_size
        return SaveTime(stood_still, done[0] - begun, before, sum(meanwhile) / max(1, len(meanwhile)))

    def at_once(self) -> SaveTime:
        before = self._idle()
        begun = time.perf_counter()
        save_pieces(self._pieces(), self._writer(), self.group)
        seconds = time.perf_counter() - begun
        return SaveTime(seconds, seconds, before, 0.0)

    def by_torch(self) -> SaveTime:
        """As most do it: rank 0 writes network and optimizer, and every rank its rows, down to the disk."""
        before = self._idle()
        begun = time.perf_counter()
        if self.world.rank == 0:
            _write_by_torch(self.folder / "state.pt", self.engine.common_state())
        _write_by_torch(self.folder / f"rows-{self.world.rank}.pt", self.sop.table.state_dict())
        self.world.barrier()
        seconds = time.perf_counter() - begun
        return SaveTime(seconds, seconds, before, 0.0)

    def _idle(self) -> float:
        seconds = sum(self._step() for _ in range(_IDLE_STEPS)) / _IDLE_STEPS
        if self.world.rank == 0:
            shutil.rmtree(self.folder / "checkpoint", ignore_errors=True)
        self.world.barrier()
        return seconds

    def _step(self) -> float:
        begun = time.perf_counter()
        with self.engine.piece(last=True):
            self.engine.backward(self.engine.forward(self.images).logsumexp(dim=1).mean())
        self.engine.step()
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)
        return time.perf_counter() - begun

    def _pieces(self) -> dict[str, Any]:
        return pieces_of(self.world, self.engine, self.sop, torch.zeros(1, dtype=torch.float64))

    def _writer(self) -> CheckpointWriter:
        about = {"step": 1, "ranks": self.world.size, "best": 0.0, "engine": "ddp", "fingerprint": {}, "config": {}}
        return CheckpointWriter(self.folder / "checkpoint", self.world.rank, self.world.size, about)


def _write_by_torch(path: Path, state: dict[str, Tensor]) -> None:
    with path.open("wb") as file:
        torch.save({name: tensor.cpu() for name, tensor in state.items()}, file)
        file.flush()
        os.fsync(file.fileno())
