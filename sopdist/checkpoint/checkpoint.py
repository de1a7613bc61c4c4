"""A checkpoint to read from: full tensors by name, whichever ranks wrote them. Independent of networks and runs.

`names.py` lists the sections.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import DataError
from ..sample_table import reshard
from . import names
from .index import Index, TensorInfo, read_index
from .old_format import is_old, read_old_index
from .reading import load_flat


class Checkpoint:
    """A complete checkpoint. Created by `open_checkpoint`."""

    def __init__(self, folder: Path, index: Index) -> None:
        self.folder, self.index = folder, index
        about = index.about
        self.format, self.step, self.ranks = index.format, int(about["step"]), int(about["ranks"])
        self.epoch, self.best = float(about.get("epoch", 0.0)), float(about["best"])
        self.engine: str = about["engine"]
        self.versions: dict[str, str] = about.get("versions", {})
        self.fingerprint: dict[str, Any] = about["fingerprint"]
        self.config: dict[str, Any] = about["config"]

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """All tensors."""
        return self.index.tensors

    @property
    def files(self) -> dict[str, int]:
        """The files with tensors, and their bytes."""
        return {name: info.bytes for name, info in self.index.files.items()}

    @property
    def table_names(self) -> list[str]:
        """The sample tables that are saved in it."""
        tables = (name for name in self.tensors if name.startswith(names.TABLES))
        return sorted({name.split("/")[1] for name in tables})

    def read(self, name: str) -> Tensor:
        """One tensor."""
        return self._read([name])[name]

    def section(self, prefix: str) -> dict[str, Tensor]:
        """All tensors whose names start with `prefix`, by the rest of the name: for `names.NETWORK`, all weights."""
        found = [name for name in self.tensors if name.startswith(prefix)]
        return {name.removeprefix(prefix): tensor for name, tensor in self._read(found).items()}

    def network(self) -> dict[str, Tensor]:
        """Weights and buffers of the network; batch statistics are the mean over ranks."""
        return self.section(names.NETWORK) | self.statistics()

    def statistics(self, rank: int | None = None) -> dict[str, Tensor]:
        """The running batch statistics of a rank, or their mean over all."""
        return self._statistics(rank)[0]

    def average_statistics(self, rank: int | None = None) -> dict[str, Tensor]:
        """Those that belong to the moving average of the weights; empty without `train.ema`."""
        return self._statistics(rank)[1]

    def _statistics(self, rank: int | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Of the network and of its moving average."""
        found = self._all_statistics(rank)
        averages = {
            name.removeprefix(names.AVERAGE): found.pop(name) for name in list(found) if name.startswith(names.AVERAGE)
        }
        return found, averages

    def _all_statistics(self, rank: int | None) -> dict[str, Tensor]:
        if rank is not None:
            return self.section(names.statistics(rank))
        counts = Counter(name.split("/", 2)[2] for name in self.tensors if name.startswith(names.STATISTICS))
        for name, count in counts.items():  # before listing a name per rank: a damaged index may claim any number
            if count != self.ranks:
                raise DataError(f"{self.folder}: {name[:100]!r} has statistics of {count} ranks, not of {self.ranks}")
        of_ranks = {name: [names.statistics(rank, name) for rank in range(self.ranks)] for name in sorted(counts)}
        found = self._read([each for all_ranks in of_ranks.values() for each in all_ranks])  # opens each file once
        return {name: _mean([found[each] for each in all_ranks]) for name, all_ranks in of_ranks.items()}

    def table(self, table: str, first: int = 0, stride: int = 1) -> dict[str, Tensor]:
        """The columns of rows `first`, `first + stride`, ... of a sample table; by default of all rows."""
        if table not in self.table_names:
            raise DataError(f"{self.folder}: has no {table} table; the method it was trained with does not use one")
        prefix = f"{names.TABLES}{table}/"
        ranks = sorted({int(name.split("/")[2]) for name in self.tensors if name.startswith(prefix)})
        if len(ranks) != self.ranks:  # all are below: `open_checkpoint` has checked
            raise DataError(f"{self.folder}: has {table} rows of ranks {ranks}, but had {self.ranks} ranks")
        if stride == self.ranks:  # as it was saved: no need to open the files of other ranks
            return self.section(names.table(table, first))
        try:
            return reshard([_Columns(self, names.table(table, rank)) for rank in ranks], first, stride)
        except (ValueError, RuntimeError, LookupError, OverflowError) as error:
            raise DataError(f"{self.folder}: {error}") from None

    def step_metrics(self, rank: int, ranks: int) -> Tensor | None:
        """The sums of a rank; if the number of ranks has changed, rank 0 gets the total. None if there are none."""
        if names.step_metrics(0) not in self.tensors:
            return None
        if ranks == self.ranks:
            return self.read(names.step_metrics(rank))
        total = torch.stack([self.read(names.step_metrics(rank)) for rank in range(self.ranks)]).sum(0)
        return total if rank == 0 else torch.zeros_like(total)

    def _read(self, wanted: list[str]) -> dict[str, Tensor]:
        for name in wanted:
            if name not in self.tensors:
                raise DataError(f"{self.folder}: has no {name}")
        flat = load_flat(self.folder, self.index, wanted)
        return {name: flat[name].view(self.tensors[name].shape) for name in wanted}


def _mean(tensors: Sequence[Tensor]) -> Tensor:
    """In float64, so that the mean of equal tensors is exactly that tensor."""
    return torch.stack([tensor.double() for tensor in tensors]).mean(0).to(tensors[0].dtype)


class _Columns(Mapping[str, Tensor]):
    """A rank's rows of a table, read column by column, so that a large table is never in memory twice."""

    def __init__(self, saved: Checkpoint, prefix: str) -> None:
        self._saved, self._prefix = saved, prefix

    def __getitem__(self, name: str) -> Tensor:
        return self._saved.read(self._prefix + name)

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(self._prefix) for name in self._saved.tensors if name.startswith(self._prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read the index of a checkpoint; DataError if there is none, it is not complete, or its index is damaged."""
    if not folder.is_dir():
        raise DataError(f"{folder}: no such checkpoint")
    index = read_old_index(folder) if is_old(folder) else read_index(folder)
    for name in index.tensors:
        if names.is_per_rank(name):
            rank = names.rank_of(name)
            if rank is None or rank >= index.about["ranks"]:
                raise DataError(f"{folder}: {name[:100]!r} belongs to no rank; there were {index.about['ranks']}")
    return Checkpoint(folder, index)
