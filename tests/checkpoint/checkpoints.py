"""Small checkpoints for tests, written by the real writer: by this process alone, or a rank's part of one."""

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
from sopdist.checkpoint.pieces import Piece, share_out
from sopdist.checkpoint.writing import CheckpointWriter, save_pieces
from sopdist.noise.rows import NoiseTable

SAMPLES, CLASSES = 23, 3


def about(step: int, ranks: int) -> dict[str, Any]:
    """What a checkpoint says of itself."""
    return {
        "step": step, "epoch": 0.5, "best": 0.25, "best_step": 3, "ranks": ranks, "engine": "ddp",
        "versions": {"sopdist": "0"}, "fingerprint": {"run.seed": 1}, "config": {"run": {"name": "x"}},
    }  # fmt: skip


def common_tensors() -> dict[str, Tensor]:
    """Of several types and shapes, what all ranks have."""
    generator = torch.Generator().manual_seed(3)
    return {
        "network/layer.weight": torch.randn(4, 3, 2, 2, generator=generator),
        "network/layer.bias": torch.randn(4, generator=generator),
        "network/batches": torch.tensor(7),
        "optimizer/layer.weight/momentum_buffer": torch.randn(4, 3, 2, 2, generator=generator),
    }


def own_tensors(rank: int, ranks: int) -> dict[str, Tensor]:
    """What only this rank has: statistics, its rows of a noise table, sums."""
    table = NoiseTable(SAMPLES, CLASSES, layout="dense", seed=5, first=rank, stride=ranks)
    own = {f"noise/{rank}/{name}": value for name, value in table.state_dict().items()}
    own[f"statistics/{rank}/norm.running_mean"] = torch.full((4,), float(rank))
    return own | {f"tally/{rank}": torch.tensor([1.0, rank], dtype=torch.float64)}


def pieces_of(rank: int = 0, ranks: int = 1) -> dict[str, Piece]:
    """What a rank writes."""
    own = {name: Piece.whole(tensor) for name, tensor in own_tensors(rank, ranks).items()}
    return share_out(common_tensors(), rank, ranks) | own


def write(
    folder: Path, pieces: Mapping[str, Piece] | None = None, group: ProcessGroup | None = None, step: int = 7
) -> Path:
    """Write a checkpoint to a folder; its path."""
    rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
    writer = CheckpointWriter(folder, rank, ranks, about(step, ranks))
    save_pieces(pieces_of(rank, ranks) if pieces is None else pieces, writer, group)
    return folder


def write_in(run: Path, step: int) -> Path:
    """A checkpoint of a run."""
    return write(run / "checkpoints" / name_of(step), {"tally/0": Piece.whole(torch.zeros(2))}, step=step)


def rewrite_index(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the index as somebody with bad intentions would: the marker fits it."""
    tree = json.loads((folder / "checkpoint.json").read_text())
    change(tree)
    put_index(folder, json.dumps(tree).encode())


def put_index(folder: Path, content: bytes) -> None:
    """Another index altogether, and a marker that fits it."""
    (folder / "checkpoint.json").write_bytes(content)
    (folder / "complete").write_text(hashlib.sha256(content).hexdigest() + "\n")
