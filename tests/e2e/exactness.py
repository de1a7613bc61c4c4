"""Runs that must come out equal: their data and config, how one of them is killed, and what "equal" means.

    place = write_place(folder)                                   # shards and small.yaml
    kill_after(place, "torchrun", 2, ["run.name=x"], saved=17)    # kill -9, once that step is saved
    assert_same_run(place / "runs/x", place / "runs/whole")

Images are coloured, moved and mirrored; one of them cannot be read. An epoch has seven steps.
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

from sopdist.checkpoint import Saved, open_checkpoint
from sopdist.checkpoint.folder import step_of
from sopdist.data.labels import write_labels
from sopdist.data.shards import Member
from tests.data.pictures import encoded, picture
from tests.data.small_splits import write_split
from tests.e2e.launchers import Ended, run, start
from tests.e2e.records import lines_of, newest_checkpoint

SAMPLES, BATCH, EPOCH, STEPS = 301, 48, 7, 40
CLASSES = tuple("abcdef")
BROKEN = 100  # the sample whose image cannot be read
SAVED = 17  # the step after which the runs here are saved, in the middle of their third epoch
CONFIG = f"""
data: {{root: shards, split: train, recipe: cifar10, labels: wrong, threads: 1}}
model: {{name: mlp}}
objective: {{visits: 1.5}}
optim: {{lr: 0.05, warmup_epochs: 0.5}}
train: {{epochs: 6, batch: {BATCH}, max_steps: {STEPS}}}
engine: {{threads: 1}}
evaluate: {{splits: {{val: val}}}}
checkpoint: {{every: 6, steps: {SAVED}, keep: 9}}
log: {{every: 1, wandb: 'off'}}
"""

# What differs from run to run: when it was, and what it cost. All else in metrics.jsonl must be the same.
_COSTS = ("time", "peak_memory_bytes")
_COST_PREFIXES, _COST_SUFFIXES = ("samples_per_second", "exchange_"), ("_share",)


def write_place(folder: Path) -> Path:
    """A folder with the splits `train` and `val`, and the config `small.yaml`."""
    for split, count in (("train", SAMPLES), ("val", 40)):
        members = [Member(f"k/{index}", "jpg", _jpeg(index), {"label": index % len(CLASSES)}) for index in range(count)]
        if split == "train":
            members[BROKEN] = members[BROKEN]._replace(image=members[BROKEN].image[:200])
        manifest = write_split(folder / "shards" / split, members, per_shard=40, classes=CLASSES)
        truth = np.arange(count) % len(CLASSES)
        wrong = np.where(np.arange(count) % 3 == 0, (truth + np.arange(count) // 3) % len(CLASSES), truth)
        for name, labels in (("clean", truth), ("wrong", wrong)):
            write_labels(folder / "shards" / split, manifest, name, labels, {"kind": "test"})
    (folder / "small.yaml").write_text(CONFIG)
    return folder


def train(place: Path, launcher: str, ranks: int, keys: Sequence[str], code: int = 0) -> Ended:
    """Train to the end."""
    ended = run(launcher, ["--cfg", "small.yaml", *keys], place, ranks)
    assert ended.code == code, ended.told
    return ended


def kill_after(place: Path, launcher: str, ranks: int, keys: Sequence[str], *, saved: int = SAVED) -> int:
    """Train until a step is saved and three more are done, and kill -9 all ranks; the newest step that is saved."""
    folder = place / "runs" / next(key.partition("=")[2] for key in keys if key.startswith("run.name="))
    started = start(launcher, ["--cfg", "small.yaml", *keys], place, ranks)
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
    assert (summary["finished"], summary["exit"]) == (False, "running"), "killed without a word"
    return step_of(newest_checkpoint(folder))


def is_saved(folder: Path, step: int) -> bool:
    return (folder / "checkpoints" / f"step-{step:08d}" / "complete").exists()


def last_step(folder: Path) -> int:
    """The step of the last whole line of training in metrics.jsonl; 0: there is none."""
    with suppress(FileNotFoundError):
        whole = (folder / "metrics.jsonl").read_text().rpartition("\n")[0].splitlines()
        return max((line["step"] for line in map(json.loads, whole) if line["kind"] == "train"), default=0)
    return 0


def told_by(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, in order, without what they cost."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not _is_cost(key)} for line in lines]


def assert_same_run(one: Path, other: Path) -> None:
    """Two runs on as many ranks, bit for bit: what was told, and all that was saved at the end."""
    assert told_by(one) == told_by(other)
    assert_same_checkpoint(newest_checkpoint(one), newest_checkpoint(other))
    for name in ("network-best.safetensors", "network-last.safetensors", "suspects.csv"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


def assert_same_checkpoint(one: Path, other: Path) -> None:
    """Weights, optimizer, statistics of each rank, noise table, counts: every tensor, and what is said about them."""
    found, wanted = open_checkpoint(one), open_checkpoint(other)
    assert about(found) == about(wanted)
    assert found.tensors.keys() == wanted.tensors.keys()
    for name in wanted.tensors:
        assert torch.equal(found.read(name), wanted.read(name)), name


def about(saved: Saved) -> dict[str, Any]:
    """What a checkpoint says of itself, but for its time and the name of its run."""
    said = {key: value for key, value in saved.index.about.items() if key not in ("time", "config")}
    return said | {"config": saved.config | {"run": None}}


def assert_worth_comparing(folder: Path) -> None:
    """Something was learned, the table is at work, and every part of a checkpoint has something in it."""
    losses = [line["loss"] for line in lines_of(folder)]
    assert losses[-1] < losses[0]
    assert lines_of(folder)[-1]["unreadable_samples"] >= last_step(folder) // EPOCH
    saved = open_checkpoint(newest_checkpoint(folder))
    parts = {name.split("/")[0] for name in saved.tensors}
    assert parts >= {"network", "optimizer", "statistics", "noise", "tally"}
    assert saved.noise()["u"].abs().max() > 0.01


def visited_in(before: Path | None, after: Path) -> list[int]:
    """The samples that were visited between two checkpoints, or since the beginning."""
    more: Tensor = visits_in(after) - (0 if before is None else visits_in(before))
    assert more.min() >= 0
    return [index for index, count in enumerate(more.tolist()) for _ in range(int(count))]


def visits_in(checkpoint: Path) -> Tensor:
    """How often each sample was visited. Put together by hand: rank r of W keeps rows r, r + W, r + 2 W, ..."""
    saved = open_checkpoint(checkpoint)
    visits = torch.full((SAMPLES,), -1, dtype=torch.int64)
    for rank in range(saved.ranks):
        visits[rank :: saved.ranks] = saved.read(f"noise/{rank}/visits").long()
    return visits


def _is_cost(key: str) -> bool:
    return key in _COSTS or key.startswith(_COST_PREFIXES) or key.endswith(_COST_SUFFIXES)


def _jpeg(index: int) -> bytes:
    """A picture of its own, with the colours of its class."""
    tint = np.random.default_rng(index % len(CLASSES)).integers(0, 256, 3)
    pixels = (np.asarray(picture(index, 120, 90), dtype=np.int64) + tint) // 2  # (90, 120, 3)
    return encoded(Image.fromarray(pixels.astype(np.uint8)))
