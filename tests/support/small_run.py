"""A small trained run for the tests of checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sopdist.train.run import run_config
from tests.support.grey_images import write_images

SAMPLES, STEPS = 61, 7  # steps per epoch at batch size 9
CONFIG = """
data: {root: shards, split: train, recipe: digits, labels: wrong, threads: 1}
model: {name: mlp}
method: {visits: 1.5, onset: always, layout: slots}
optim: {lr: 0.05, schedule: constant}
train: {epochs: 3, batch: 9}
engine: {threads: 1}
evaluate: {splits: {val: val}}
checkpoint: {keep: 9}
log: {every: 1, wandb: 'off'}
"""

Sopdist = Callable[..., str]  # calls `sopdist checkpoint`; returns its output


def train_small_run(folder: Path, config: str) -> Path:
    """Write shards and the config `small.yaml` to a folder and train the run `whole`, without interruption."""
    write_images(folder / "shards" / "train", SAMPLES)
    write_images(folder / "shards" / "val", 30)
    (folder / "small.yaml").write_text(config)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run_config("small.yaml", ["run.name=whole"]) == 0
    return folder


def step(run: Path, number: int) -> Path:
    """The folder of the checkpoint saved at a step."""
    return run / "checkpoints" / f"step-{number:08d}"
