"""Read what a run has written: its metrics, its newest checkpoint and the full noise table in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sopdist.checkpoint import complete_checkpoints, open_checkpoint
from sopdist.noise.rows import NoiseTable

MEANS = ("mean_loss", "mean_margin")


def lines_of(run: Path, kind: str = "train") -> list[dict[str, Any]]:
    """The lines of a kind in metrics.jsonl."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def losses_of(run: Path) -> list[float]:
    """The loss of every step, each of which must be logged exactly once (log.every=1)."""
    lines = lines_of(run)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


def newest_checkpoint(run: Path) -> Path:
    return complete_checkpoints(run)[-1]


def table_in(checkpoint: Path) -> dict[str, Tensor]:
    """The full, dense noise table of a checkpoint from any number of ranks and in either layout."""
    full = open_checkpoint(checkpoint).table("noise")
    _, samples, classes, seed, *_ = full["meta"].tolist()
    table = NoiseTable(samples, classes, layout="dense", seed=seed)
    table.load_state_dict(full)
    return columns_of(table)


def columns_of(table: NoiseTable) -> dict[str, Tensor]:
    """The columns of a table that owns all rows."""
    all_samples = torch.arange(table.num_samples)
    columns = {name: getattr(table, name).clone() for name in ("u", "visits", *MEANS)}
    return columns | {"v": table.dense_v(all_samples)}
