"""Runs that must have the same result: their data and config, how to kill one, and how to compare two.

    workspace = write_workspace(folder)                               # shards and small.yaml
    kill_after(workspace, "torchrun", 2, ["run.name=x"], saved=17)    # kill -9 once that step is saved
    assert_same_run(workspace / "runs/x", workspace / "runs/uninterrupted")

Images are coloured, shifted and flipped; one of them cannot be read. An epoch has seven steps.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from sopdist.checkpoint import Checkpoint, open_checkpoint
from sopdist.checkpoint.folder import step_of
from sopdist.data.labels import write_labels
from sopdist.data.shards import Member
from tests.support.launchers import Ended, run, start
from tests.support.pictures import encoded, picture
from tests.support.records import lines_of, newest_checkpoint
from tests.support.small_splits import write_split

SAMPLES, BATCH, EPOCH, STEPS = 301, 48, 7, 40
CLASSES = tuple("abcdef")
BROKEN = 100  # sample with an unreadable image
SAVED = 17  # step with a checkpoint, in the middle of the third epoch
CONFIG = f"""
data: {{root: shards, split: train, recipe: cifar10, labels: wrong, threads: 1}}
model: {{name: mlp}}
method: {{visits: 1.5, onset: always}}
optim: {{lr: 0.05, warmup_epochs: 0.5}}
train: {{epochs: 6, batch: {BATCH}, max_steps: {STEPS}}}
engine: {{threads: 1}}
evaluate: {{splits: {{val: val}}}}
checkpoint: {{every: 6, steps: {SAVED}, keep: 9}}
log: {{every: 1, wandb: 'off'}}
"""

# Times and costs differ from run to run. All other values in metrics.jsonl must be the same.
_COSTS = ("time", "peak_memory_bytes")
_COST_PREFIXES, _COST_SUFFIXES = ("samples_per_second", "exchange_"), ("_share",)


def write_workspace(folder: Path) -> Path:
    """Write the splits `train` and `val` and the config `small.yaml` into a folder, and return it."""
    for split, count in (("train", SAMPLES), ("val", 40)):
        members = [Member(f"k/{index}", "jpg", _jpeg(index), {"label": index % len(CLASSES)}) for index in range(count)]
        if split == "train":
            members[BROKEN] = members[BROKEN]._replace(image=members[BROKEN].image[:200])
        manifest = write_split(folder / "shards" / split, members, per_shard=40, classes=CLASSES)
        clean = np.arange(count) % len(CLASSES)
        wrong = np.where(np.arange(count) % 3 == 0, (clean + np.arange(count) // 3) % len(CLASSES), clean)
        for name, labels in (("clean", clean), ("wrong", wrong)):
            write_labels(folder / "shards" / split, manifest, name, labels, {"kind": "test"})
    (folder / "small.yaml").write_text(CONFIG)
    return folder


def train(workspace: Path, launcher: str, ranks: int, keys: Sequence[str], code: int = 0) -> Ended:
    """Train until the run ends."""
    ended = run(launcher, ["--cfg", "small.yaml", *keys], workspace, ranks)
    assert ended.code == code, ended.output
    return ended


def kill_after(workspace: Path, launcher: str, ranks: int, keys: Sequence[str], *, saved: int = SAVED) -> int:
    """Train until a step is saved and three more are done, then kill -9 all ranks. Return the newest saved step."""
    folder = workspace / "runs" / next(key.partition("=")[2] for key in keys if key.startswith("run.name="))
    started = start(launcher, ["--cfg", "small.yaml", *keys], workspace, ranks)
    try:
        pids: list[int] = []
        until = time.monotonic() + 120
        while not (is_saved(folder, saved) and last_step(folder) >= saved + 3):
            assert time.monotonic() < until, started.err.read_text()
            assert started.processes[0].poll() is None, started.err.read_text()
            if len(pids) < ranks:
                pids = started.ranks()
            time.sleep(0.002)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert len(pids) == ranks
    finally:
        started.kill()
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["finished"], summary["exit"]) == (False, "running"), "the run was killed"
    return step_of(newest_checkpoint(folder))


def is_saved(folder: Path, step: int) -> bool:
    return (folder / "checkpoints" / f"step-{step:08d}" / "complete").exists()


def last_step(folder: Path) -> int:
    """The step of the last complete line of training in metrics.jsonl; 0 if there is none."""
    with suppress(FileNotFoundError):
        complete = (folder / "metrics.jsonl").read_text().rpartition("\n")[0].splitlines()
        return max((line["step"] for line in map(json.loads, complete) if line["kind"] == "train"), default=0)
    return 0


def deterministic_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, in order, without times and costs."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not _is_cost(key)} for line in lines]


def assert_same_run(one: Path, other: Path) -> None:
    """Two runs on the same number of ranks have the same metrics and final files, bit for bit."""
    assert deterministic_metrics(one) == deterministic_metrics(other)
    assert_same_checkpoint(newest_checkpoint(one), newest_checkpoint(other))
    for name in ("network-best.safetensors", "network-last.safetensors", "suspects.csv"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


def assert_same_checkpoint(one: Path, other: Path) -> None:
    """Every tensor is equal: weights, optimizer, statistics of each rank, noise table, counts; and so is the index."""
    found, wanted = open_checkpoint(one), open_checkpoint(other)
    assert description_of(found) == description_of(wanted)
    assert found.tensors.keys() == wanted.tensors.keys()
    for name in wanted.tensors:
        assert torch.equal(found.read(name), wanted.read(name)), name


def description_of(saved: Checkpoint) -> dict[str, Any]:
    """The metadata of a checkpoint, without its time and the settings of its run."""
    values = {key: value for key, value in saved.index.about.items() if key not in ("time", "config")}
    return values | {"config": saved.config | {"run": None}}


def assert_worth_comparing(folder: Path) -> None:
    """The network has learned, the noise table has changed, and no section of the checkpoint is empty."""
    losses = [line["loss"] for line in lines_of(folder)]
    assert losses[-1] < losses[0]
    assert lines_of(folder)[-1]["unreadable_samples"] >= last_step(folder) // EPOCH
    saved = open_checkpoint(newest_checkpoint(folder))
    parts = {name.split("/")[0] for name in saved.tensors}
    assert parts >= {"network", "optimizer", "statistics", "tables", "step_metrics"}
    assert saved.table("noise")["u"].abs().max() > 0.01


def visited_in(before: Path | None, after: Path) -> list[int]:
    """The samples that were visited between two checkpoints, or since the start."""
    more: Tensor = visits_in(after) - (0 if before is None else visits_in(before))
    assert more.min() >= 0
    return [index for index, count in enumerate(more.tolist()) for _ in range(int(count))]


def visits_in(checkpoint: Path) -> Tensor:
    """How often each sample was visited, from the rows of each rank: rank r of W owns rows r, r + W, r + 2 W, ..."""
    saved = open_checkpoint(checkpoint)
    visits = torch.full((SAMPLES,), -1, dtype=torch.int64)
    for rank in range(saved.ranks):
        visits[rank :: saved.ranks] = saved.read(f"tables/noise/{rank}/visits").long()
    return visits


def _is_cost(key: str) -> bool:
    return key in _COSTS or key.startswith(_COST_PREFIXES) or key.endswith(_COST_SUFFIXES)


def _jpeg(index: int) -> bytes:
    """A picture that differs from all others, with the colours of its class."""
    tint = np.random.default_rng(index % len(CLASSES)).integers(0, 256, 3)
    pixels = (np.asarray(picture(index, 120, 90), dtype=np.int64) + tint) // 2  # (90, 120, 3)
    return encoded(Image.fromarray(pixels.astype(np.uint8)))
