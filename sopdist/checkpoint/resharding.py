"""Rewrite a checkpoint for a different number of ranks, in one process: the same state in different files.

Five samples, two ranks with rows [0, 2, 4] and [1, 3], written for three: [0, 3], [1, 4], [2]. The batch statistics of
every rank become the mean of all, as they do when a run resumes on a different number of ranks; sums go to rank 0.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from ..sample_table import reshard
from . import names
from .checkpoint import Checkpoint
from .fragments import distribute
from .index import FORMAT, FileInfo, FragmentLocation, Index, TensorInfo, commit, file_of
from .tensor_file import write_tensors


def write_for(folder: Path, saved: Checkpoint, ranks: int, progress: Callable[[int], object] = lambda _: None) -> None:
    """Write to a new folder, the marker last; if that fails, nothing is left."""
    folder.mkdir(parents=True)
    try:
        _write(folder, saved, ranks, progress)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _write(folder: Path, saved: Checkpoint, ranks: int, progress: Callable[[int], object]) -> None:
    index = Index(FORMAT, {**saved.index.about, "ranks": ranks})
    replicated = {name: saved.read(name) for name in saved.tensors if name.startswith(names.REPLICATED)}
    statistics = _statistics(saved, ranks)
    tables = {table: saved.table(table) for table in saved.table_names}
    for rank in range(ranks):
        tensors = {name: fragment.values for name, fragment in distribute(replicated, rank, ranks).items()}
        tensors |= {names.statistics(rank, name): values for name, values in statistics(rank).items()}
        sums = saved.step_metrics(rank, ranks)
        if sums is not None:
            tensors[names.step_metrics(rank)] = sums
        for table, rows in tables.items():
            columns = reshard([rows], rank, ranks)
            tensors |= {names.table(table, rank, name): column for name, column in columns.items()}
        file = file_of(rank, ranks)
        written = write_tensors(folder / file, tensors)
        index.files[file] = FileInfo(written.size, written.sha256)
        for name, tensor in tensors.items():
            location = FragmentLocation(file, name, 0, tensor.numel())
            index.tensors[name] = TensorInfo(tensor.dtype, tuple(tensor.shape), (location,))
        progress(1)
    commit(folder, index)


def _statistics(saved: Checkpoint, ranks: int) -> Callable[[int], dict[str, Tensor]]:
    """The batch statistics of each rank: its own, or the mean if the number of ranks changes."""
    if ranks == saved.ranks:
        return saved.statistics
    mean = saved.statistics()
    return lambda _rank: mean
