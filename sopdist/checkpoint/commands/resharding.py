"""A checkpoint written again for another number of ranks, by one process. Same state, other pieces.

Five samples, two ranks with rows [0, 2, 4] and [1, 3], written for three: [0, 3], [1, 4], [2]. Every rank's batch
statistics become the mean of all, as they do when a run goes on at another number of ranks; sums go to the first rank.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ...noise.dealing import deal
from ..index import FORMAT, FileInfo, Index, Place, TensorInfo, commit, file_of
from ..pieces import share_out
from ..saved import Saved
from ..tensor_file import write_tensors


def write_for(folder: Path, saved: Saved, ranks: int, progress: Callable[[int], object] = lambda _: None) -> None:
    """Write to a new folder, the marker last; if that fails, nothing is left."""
    folder.mkdir(parents=True)
    try:
        _write(folder, saved, ranks, progress)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _write(folder: Path, saved: Saved, ranks: int, progress: Callable[[int], object]) -> None:
    index = Index(FORMAT, {**saved.index.about, "ranks": ranks})
    common = {name: saved.read(name) for name in saved.tensors if name.startswith(("network/", "optimizer/", "sound/"))}
    own = _own_of_ranks(saved, ranks)
    rows = saved.noise() if saved.has_noise else None
    for rank in range(ranks):
        tensors = {name: piece.values for name, piece in share_out(common, rank, ranks).items()} | own(rank)
        if rows is not None:
            tensors |= {f"noise/{rank}/{name}": column for name, column in deal([rows], rank, ranks).items()}
        file = file_of(rank, ranks)
        written = write_tensors(folder / file, tensors)
        index.files[file] = FileInfo(written.size, written.sha256)
        for name, tensor in tensors.items():
            place = Place(file, name, 0, tensor.numel())
            index.tensors[name] = TensorInfo(tensor.dtype, tuple(tensor.shape), (place,))
        progress(1)
    commit(folder, index)


def _own_of_ranks(saved: Saved, ranks: int) -> Callable[[int], dict[str, Tensor]]:
    """What each rank has for itself, beside its rows: its batch statistics and its sums."""
    if ranks == saved.ranks:
        prefixes = ("statistics", "tally")
        return lambda rank: {
            name: saved.read(name)
            for name in saved.tensors
            if name.split("/")[0] in prefixes and name.split("/")[1] == str(rank)
        }
    mean = saved.statistics()
    sums = [saved.read(name) for name in saved.tensors if name.startswith("tally/")]
    total = torch.stack(sums).sum(0) if sums else None

    def own(rank: int) -> dict[str, Tensor]:
        tensors = {f"statistics/{rank}/{name}": values for name, values in mean.items()}
        if total is not None:
            tensors[f"tally/{rank}"] = total if rank == 0 else torch.zeros_like(total)
        return tensors

    return own
