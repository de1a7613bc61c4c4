"""Small checkpoints for tests, written with the real writer: by this process alone, or by one rank of several."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from sopdist.checkpoint.folder import name_of
from sopdist.checkpoint.fragments import Fragment, distribute
from sopdist.checkpoint.writing import CheckpointWriter, save_fragments
from sopdist.noise.rows import NoiseTable

SAMPLES, CLASSES = 23, 3


def about(step: int, ranks: int) -> dict[str, Any]:
    """Metadata of a checkpoint."""
    return {
        "step": step, "epoch": 0.5, "best": 0.25, "best_step": 3, "ranks": ranks, "engine": "ddp",
        "versions": {"sopdist": "0"}, "fingerprint": {"run.seed": 1}, "config": {"run": {"name": "x"}},
    }  # fmt: skip


def common_tensors() -> dict[str, Tensor]:
    """Replicated tensors of several dtypes and shapes."""
    generator = torch.Generator().manual_seed(3)
    return {
        "network/layer.weight": torch.randn(4, 3, 2, 2, generator=generator),
        "network/layer.bias": torch.randn(4, generator=generator),
        "network/batches": torch.tensor(7),
        "optimizer/layer.weight/momentum_buffer": torch.randn(4, 3, 2, 2, generator=generator),
    }


def own_tensors(rank: int, ranks: int) -> dict[str, Tensor]:
    """Tensors that only this rank has: statistics, its rows of a noise table, sums."""
    table = NoiseTable(SAMPLES, CLASSES, layout="dense", seed=5, first=rank, stride=ranks)
    own = {f"tables/noise/{rank}/{name}": value for name, value in table.state_dict().items()}
    own[f"statistics/{rank}/norm.running_mean"] = torch.full((4,), float(rank))
    return own | {f"step_metrics/{rank}": torch.tensor([1.0, rank], dtype=torch.float64)}


def fragments_of(rank: int = 0, ranks: int = 1) -> dict[str, Fragment]:
    """The fragments that a rank writes."""
    own = {name: Fragment.full(tensor) for name, tensor in own_tensors(rank, ranks).items()}
    return distribute(common_tensors(), rank, ranks) | own


def write(
    folder: Path, fragments: Mapping[str, Fragment] | None = None, group: ProcessGroup | None = None, step: int = 7
) -> Path:
    """Write a checkpoint to a folder; returns the folder."""
    rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
    writer = CheckpointWriter(folder, rank, ranks, about(step, ranks))
    save_fragments(fragments_of(rank, ranks) if fragments is None else fragments, writer, group)
    return folder


def write_in(run: Path, step: int) -> Path:
    """Write a checkpoint of a run."""
    return write(run / "checkpoints" / name_of(step), {"step_metrics/0": Fragment.full(torch.zeros(2))}, step=step)


def rewrite_index(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the index as an attacker would, with a matching marker."""
    tree = json.loads((folder / "checkpoint.json").read_text())
    change(tree)
    put_index(folder, json.dumps(tree).encode())


def put_index(folder: Path, content: bytes) -> None:
    """Replace the index, with a matching marker."""
    (folder / "checkpoint.json").write_bytes(content)
    (folder / "complete").write_text(hashlib.sha256(content).hexdigest() + "\n")
