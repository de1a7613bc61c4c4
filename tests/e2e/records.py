"""What a run left behind, read by tests: metrics by step, and its noise table put together."""

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
    """The lines of a kind in metrics.jsonl, as they stand there."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def losses_of(run: Path) -> list[float]:
    """The loss of every step; a run with log.every=1 has written each exactly once."""
    lines = lines_of(run)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


def newest_checkpoint(run: Path) -> Path:
    return complete_checkpoints(run)[-1]


def table_in(checkpoint: Path) -> dict[str, Tensor]:
    """The whole noise table of a checkpoint, of any number of ranks and in either layout: every v of every row."""
    whole = open_checkpoint(checkpoint).noise()
    _, samples, classes, seed, *_ = whole["meta"].tolist()
    table = NoiseTable(samples, classes, layout="dense", seed=seed)
    table.load_state_dict(whole)
    return columns_of(table)


def columns_of(table: NoiseTable) -> dict[str, Tensor]:
    """The columns of a table that has all rows."""
    everyone = torch.arange(table.num_samples)
    columns = {name: getattr(table, name).clone() for name in ("u", "visits", *MEANS)}
    return columns | {"v": table.dense_v(everyone)}
