"""Saved sample tables of W ranks, split for a different number of ranks.

Rank r of W holds rows r, r + W, r + 2W, ... Two ranks with five samples hold [0, 2, 4] and [1, 3]; split for three
ranks these are [0, 3], [1, 4] and [2].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .table import META

_SKIPPED = "skipped"  # a counter, not a row
_SAMPLES, _FIRST, _STRIDE = (META.index(name) for name in ("num_samples", "first", "stride"))


def reshard(parts: Sequence[Mapping[str, Tensor]], first: int, stride: int) -> dict[str, Tensor]:
    """The table that rank `first` of `stride` loads, from the saved tables of all ranks, given in any order.

    Columns are read one at a time, so `parts` may be backed by files.
    """
    by_rank = sorted(parts, key=lambda part: int(part["meta"][_FIRST]))
    meta = by_rank[0]["meta"].clone()
    samples = int(meta[_SAMPLES])
    for rank, part in enumerate(by_rank):
        found = part["meta"].tolist()
        if found[_FIRST] != rank or found[_STRIDE] != len(by_rank) or found[_SAMPLES] != samples:
            raise ValueError(f"the {len(by_rank)} parts of the table do not belong together")
    meta[_FIRST], meta[_STRIDE] = first, stride
    columns = {"meta": meta}
    for name in by_rank[0]:
        if name == _SKIPPED:
            columns[name] = _skipped(by_rank, first, stride)
        elif name != "meta":
            columns[name] = _rows(by_rank, name, samples, first, stride)
    return columns


def _skipped(parts: Sequence[Mapping[str, Tensor]], first: int, stride: int) -> Tensor:
    """Counters belong to no row: if the number of ranks changes, the first rank keeps their sum."""
    if stride == len(parts):
        return parts[first][_SKIPPED]
    total = torch.stack([part[_SKIPPED] for part in parts]).sum(0)
    return total if first == 0 else torch.zeros_like(total)


def _rows(parts: Sequence[Mapping[str, Tensor]], name: str, samples: int, first: int, stride: int) -> Tensor:
    if stride == len(parts):
        return parts[first][name]
    full = torch.empty(0)
    for rank, part in enumerate(parts):
        column = part[name]  # only once: it may be read from a file
        if rank == 0:
            full = torch.empty(samples, *column.shape[1:], dtype=column.dtype)
        full[rank :: len(parts)] = column
    return full[first::stride].clone()
