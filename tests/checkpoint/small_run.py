"""A small run, really trained, for the tests of checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sopdist.train.running import run_config
from tests.train.grey_images import write_images

SAMPLES, STEPS = 61, 7  # steps of an epoch, at a batch of 9
CONFIG = """
data: {root: shards, split: train, recipe: digits, labels: wrong, threads: 1}
model: {name: mlp}
objective: {visits: 1.5, layout: slots}
optim: {lr: 0.05, schedule: constant}
train: {epochs: 3, batch: 9}
engine: {threads: 1}
evaluate: {splits: {val: val}}
checkpoint: {keep: 9}
log: {every: 1, wandb: 'off'}
"""

Sopdist = Callable[..., str]  # calls `sopdist checkpoint`; gives what it printed


def train_whole(folder: Path, config: str) -> Path:
    """Shards, the config `small.yaml`, and the run `whole` of it, all in a folder."""
    write_images(folder / "shards" / "train", SAMPLES)
    write_images(folder / "shards" / "val", 30)
    (folder / "small.yaml").write_text(config)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run_config("small.yaml", ["run.name=whole"]) == 0
    return folder


def step(run: Path, number: int) -> Path:
    """The folder of a checkpoint."""
    return run / "checkpoints" / f"step-{number:08d}"
