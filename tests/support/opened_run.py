"""A run of one rank in this process, opened but not started: the parts that `sopdist.train.run` puts together.

with open_run(split, folder, train={"epochs": 1}) as run:
    run.train()
    assert run.progress.step == 3
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sopdist.config import build
from sopdist.train.config import Config
from sopdist.train.distributed.launch_env import LaunchEnv
from sopdist.train.distributed.stop_requests import Requests
from sopdist.train.distributed.world import World, open_world
from sopdist.train.loop import train
from sopdist.train.progress import Progress
from sopdist.train.record.reporter import Reporter
from sopdist.train.saving.resume import load_checkpoint
from sopdist.train.saving.saver import Saver
from sopdist.train.session import Session, lock_run_folder, open_session

SAMPLES, BATCH, STEPS = 24, 8, 3  # steps per epoch


@dataclass
class OpenedRun:
    """The parts of a run."""

    session: Session
    progress: Progress
    reporter: Reporter
    saver: Saver

    def train(self) -> None:
        """Train to the end."""
        train(self.session, self.progress, self.reporter, self.saver)

    def lines(self) -> list[dict[str, Any]]:
        """The lines of training in metrics.jsonl."""
        lines = (self.session.folder / "metrics.jsonl").read_text().splitlines()
        return [line for line in map(json.loads, lines) if line["kind"] == "train"]


def make_config(split: Path, folder: Path, **changes: Mapping[str, Any]) -> Config:
    """A small config of four epochs without checkpoints; `changes` are keys of its sections."""
    tree: dict[str, Any] = {
        "run": {"name": "run", "folder": str(folder)},
        "data": {"root": str(split), "recipe": "cifar10", "threads": 1},
        "model": {"name": "mlp"}, "train": {"epochs": 4, "batch": BATCH, "max_nonfinite_steps": 2},
        "engine": {"threads": 1}, "checkpoint": {"every": 0}, "log": {"wandb": "off", "every": 1},
    }  # fmt: skip
    for section, values in changes.items():
        tree[section] = tree.get(section, {}) | values
    return build(Config, tree)


@contextmanager
def one_rank(config: Config) -> Iterator[World]:
    """A world of this process alone."""
    world = open_world(LaunchEnv(), config.engine)
    try:
        yield world
    finally:
        world.close()


@contextmanager
def open_run(
    split: Path, folder: Path, *, resume_from: Path | None = None, **changes: Mapping[str, Any]
) -> Iterator[OpenedRun]:
    """Open a run from scratch, or with the state of a checkpoint."""
    config = make_config(split, folder, **changes)
    with one_rank(config) as world:
        session = open_session(config, world, Requests("python"), lock_run_folder(config, world, resume=False))
        try:
            progress = Progress()
            reporter = Reporter(session, progress)
            if resume_from is not None:
                load_checkpoint(session, progress, reporter, resume_from)
            reporter.open(resume=False)
            yield OpenedRun(session, progress, reporter, Saver(session, progress, reporter))
        finally:
            session.close()


def break_at(session: Session, calls: Mapping[int, int | None]) -> None:
    """Let the n-th forward pass of training return NaN: for the sample at a position, or (None) for all."""
    count = [-1]

    def spoil(module: nn.Module, _: Any, logits: Tensor) -> Tensor:
        if not module.training:
            return logits
        count[0] += 1
        if count[0] not in calls:
            return logits
        position = calls[count[0]]
        bad = torch.zeros(len(logits), 1, dtype=torch.bool)
        bad[slice(None) if position is None else position] = True
        return logits.masked_fill(bad, math.nan)

    session.engine.network.register_forward_hook(spoil)
