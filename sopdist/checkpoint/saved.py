"""A checkpoint, to be read: whole tensors by name, whoever wrote which piece of them. Knows no network and no run.

network/NAME              weights and buffers
optimizer/NAME/KEY        what the optimizer keeps of a weight
statistics/RANK/NAME      running batch statistics, which every rank has its own of
noise/RANK/COLUMN         a rank's rows of the noise table
sound/NAME                batch statistics as they last were on average over the ranks
tally/RANK                sums of a rank that are not yet in metrics.jsonl
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data.errors import DataError
from ..noise.dealing import deal
from .index import Index, TensorInfo, read_index
from .old_format import is_old, read_old_index
from .reading import load_flat

_OF_A_RANK = re.compile(r"(statistics|noise)/([0-9]{1,6})/.+|tally/([0-9]{1,6})", re.DOTALL)


class Saved:
    """A complete checkpoint. Made by `open_checkpoint`."""

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
    def has_noise(self) -> bool:
        """Whether there is a noise table."""
        return any(name.startswith("noise/") for name in self.tensors)

    def read(self, name: str) -> Tensor:
        """One tensor."""
        return self._read([name])[name]

    def section(self, prefix: str) -> dict[str, Tensor]:
        """All tensors whose names begin so, by the rest of the name: of `network/` all weights."""
        names = [name for name in self.tensors if name.startswith(prefix)]
        return {name.removeprefix(prefix): tensor for name, tensor in self._read(names).items()}

    def network(self) -> dict[str, Tensor]:
        """Weights and buffers of the network; batch statistics are the mean over ranks."""
        return self.section("network/") | self.statistics()

    def statistics(self, rank: int | None = None) -> dict[str, Tensor]:
        """The running batch statistics of a rank, or their mean over all."""
        if rank is not None:
            return self.section(f"statistics/{rank}/")
        counts = Counter(name.split("/", 2)[2] for name in self.tensors if name.startswith("statistics/"))
        for name, count in counts.items():  # before a name is made for each rank, of which there may be too many
            if count != self.ranks:
                raise DataError(f"{self.folder}: {name[:100]!r} has statistics of {count} ranks, not of {self.ranks}")
        of_ranks = {name: [f"statistics/{rank}/{name}" for rank in range(self.ranks)] for name in sorted(counts)}
        found = self._read(
            [each for of_all in of_ranks.values() for each in of_all]
        )  # at once: each file is opened once
        return {name: _mean([found[each] for each in of_all]) for name, of_all in of_ranks.items()}

    def noise(self, first: int = 0, stride: int = 1) -> dict[str, Tensor]:
        """What a noise table that holds rows `first`, `first + stride`, ... is to load: all rows unless told."""
        if not self.has_noise:
            raise DataError(f"{self.folder}: has no noise table; was it written with objective.name = ce?")
        ranks = sorted({int(name.split("/")[1]) for name in self.tensors if name.startswith("noise/")})
        if len(ranks) != self.ranks:  # none of them is of another rank: `open_checkpoint` has looked
            raise DataError(f"{self.folder}: has rows of the noise table of ranks {ranks}, and had {self.ranks} ranks")
        if stride == self.ranks:  # as it was: the files of other ranks need not be looked at
            return self.section(f"noise/{first}/")
        try:
            return deal([_Columns(self, f"noise/{rank}/") for rank in ranks], first, stride)
        except (ValueError, RuntimeError, LookupError, OverflowError) as error:
            raise DataError(f"{self.folder}: {error}") from None

    def _read(self, names: list[str]) -> dict[str, Tensor]:
        for name in names:
            if name not in self.tensors:
                raise DataError(f"{self.folder}: has no {name}")
        flat = load_flat(self.folder, self.index, names)
        return {name: flat[name].view(self.tensors[name].shape) for name in names}


def _mean(tensors: Sequence[Tensor]) -> Tensor:
    """In float64, so that the mean of equal ones is what they are."""
    return torch.stack([tensor.double() for tensor in tensors]).mean(0).to(tensors[0].dtype)


class _Columns(Mapping[str, Tensor]):
    """A rank's rows of the noise table, read column by column, so that a large table is never in memory twice."""

    def __init__(self, saved: Saved, prefix: str) -> None:
        self._saved, self._prefix = saved, prefix

    def __getitem__(self, name: str) -> Tensor:
        return self._saved.read(self._prefix + name)

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(self._prefix) for name in self._saved.tensors if name.startswith(self._prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def open_checkpoint(folder: Path) -> Saved:
    """Read what is in a checkpoint; DataError if it is none, is not complete, or its index is damaged."""
    if not folder.is_dir():
        raise DataError(f"{folder}: no such checkpoint")
    index = read_old_index(folder) if is_old(folder) else read_index(folder)
    for name in index.tensors:
        if name.startswith(("statistics/", "noise/", "tally/")):
            of_rank = _OF_A_RANK.fullmatch(name)
            if not of_rank or int(of_rank[2] or of_rank[3]) >= index.about["ranks"]:
                raise DataError(f"{folder}: {name[:100]!r} is of no rank; there were {index.about['ranks']}")
    return Saved(folder, index)
