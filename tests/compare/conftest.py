"""A folder with tiny splits and a config, and runs that train in the process of the test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sopdist.cli import main
from sopdist.compare import running
from sopdist.compare.plan import Run
from sopdist.train.run import run_config
from tests.support.grey_images import write_images

CONFIG = """
data: {root: shards, split: train, recipe: digits, labels: wrong, backend: cpu, threads: 1}
model: {name: small_conv}
method: {name: sop, visits: 1.5, onset: always}
optim: {lr: 0.05, schedule: constant}
train: {epochs: 2, batch: 16}
engine: {threads: 1}
evaluate: {splits: {val: val, test: test}}
log: {every: 1, wandb: 'off'}
"""
SAMPLES = 61

Compare = Callable[..., int]  # calls `sopdist compare --cfg tiny.yaml --out out ARGUMENTS`; returns the exit code


def write_workspace(folder: Path) -> Path:
    for split, count in (("train", SAMPLES), ("val", 40), ("test", 50)):
        write_images(folder / "shards" / split, count)
    (folder / "tiny.yaml").write_text(CONFIG)
    return folder


def train_here(run: Run, launcher: str) -> int:
    """Instead of `running.train_process`: in the process of the test, which saves the start of another."""
    assert not launcher
    return run_config(run.arguments[0], run.arguments[1:], resume="auto")


def compare(*arguments: str) -> int:
    return main(["compare", "--cfg", "tiny.yaml", "--out", "out", *arguments])


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_workspace(tmp_path)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Train in this process; the names of the runs that were trained, in order."""
    names: list[str] = []

    def train(run: Run, launcher: str) -> int:
        names.append(run.name)
        return train_here(run, launcher)

    monkeypatch.setattr(running, "train_process", train)
    return names
