"""Saved noise tables of ranks, put together and dealt anew to another number of ranks.

Rank r of W holds rows r, r + W, r + 2W, ... Two ranks with five samples hold [0, 2, 4] and [1, 3]; dealt to three
ranks these are [0, 3], [1, 4] and [2].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

_SKIPPED, _META = "skipped", "meta"
_SAMPLES, _FIRST, _STRIDE = 1, 4, 5  # places in `meta`


def deal(parts: Sequence[Mapping[str, Tensor]], first: int, stride: int) -> dict[str, Tensor]:
    """What the rank `first` of `stride` is to load, out of the saved tables of all ranks, in any order."""
    by_rank = sorted(parts, key=lambda part: int(part[_META][_FIRST]))
    meta = by_rank[0][_META].clone()
    samples = int(meta[_SAMPLES])
    for rank, part in enumerate(by_rank):
        found = part[_META].tolist()
        if found[_FIRST] != rank or found[_STRIDE] != len(by_rank) or found[_SAMPLES] != samples:
            raise ValueError(f"the {len(by_rank)} parts of the noise table do not belong together")
    dealt = {name: _rows(by_rank, name, samples, first, stride) for name in by_rank[0] if name not in (_SKIPPED, _META)}
    meta[_FIRST], meta[_STRIDE] = first, stride
    return dealt | {_SKIPPED: _skipped(by_rank, first, stride), _META: meta}


def _skipped(parts: Sequence[Mapping[str, Tensor]], first: int, stride: int) -> Tensor:
    """Counts of samples that did not count are of no row: of other ranks the first one keeps the sum."""
    if stride == len(parts):
        return parts[first][_SKIPPED]
    total = torch.stack([part[_SKIPPED] for part in parts]).sum(0)
    return total if first == 0 else torch.zeros_like(total)


def _rows(parts: Sequence[Mapping[str, Tensor]], name: str, samples: int, first: int, stride: int) -> Tensor:
    if stride == len(parts):
        return parts[first][name]
    whole = torch.empty(0)
    for rank, part in enumerate(parts):
        column = part[name]  # once: it may be read from a file
        if rank == 0:
            whole = torch.empty(samples, *column.shape[1:], dtype=column.dtype)
        whole[rank :: len(parts)] = column
    return whole[first::stride].clone()
