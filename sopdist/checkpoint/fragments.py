"""Fragments: the part of each tensor that one rank writes. Independent of files.

DDP: rank 0 and rank 1 both hold the weights `a` (6 MB), `b` (4 MB) and `c` (1 MB). Rank 0 writes `a`, rank 1 writes
`b` and `c`.
ZeRO: the optimizer state is partitioned. Of a tensor with nine elements, rank 0 holds elements 0 to 4 and rank 1 the
rest. Each rank writes the fragment it holds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Fragment:
    """Consecutive elements of a flattened tensor, held by one rank."""

    values: Tensor  # of any shape; in order, its elements are those of the flattened tensor from `start` on
    start: int
    shape: tuple[int, ...]  # of the full tensor

    @classmethod
    def full(cls, values: Tensor) -> Fragment:
        """The full tensor as one fragment."""
        return cls(values.detach(), 0, tuple(values.shape))

    @property
    def elements(self) -> int:
        """Number of elements of the full tensor."""
        return math.prod(self.shape)


def distribute(tensors: Mapping[str, Tensor], rank: int, ranks: int) -> dict[str, Fragment]:
    """Choose which of the replicated tensors this rank writes, so that all ranks write about the same number of bytes.

    The result depends only on names and sizes: all ranks compute the same assignment without communication.
    """
    load = [0] * ranks
    mine = {}
    for name in sorted(tensors, key=lambda name: (-tensors[name].nbytes, name)):
        writer = load.index(min(load))
        load[writer] += tensors[name].nbytes
        if writer == rank:
            mine[name] = Fragment.full(tensors[name])
    return mine
