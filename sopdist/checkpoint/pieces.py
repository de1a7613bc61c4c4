"""Pieces: what each rank writes of a tensor that all ranks, or several, have. Knows tensors, not files.

Rank 0 and rank 1 of DDP have the same weights `a` (6 MB), `b` (4 MB), `c` (1 MB): rank 0 writes `a`, rank 1 `b` and
`c`. Of an optimizer that ZeRO has cut up, rank 0 has elements 0 to 4 of a tensor of nine, rank 1 the others: each
writes its own piece.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """Elements of a tensor, counted in its own order of elements, that one rank has."""

    values: Tensor  # in any shape; its elements in order are those of the tensor from `start` on
    start: int
    shape: tuple[int, ...]  # of the whole tensor

    @classmethod
    def whole(cls, values: Tensor) -> Piece:
        """The tensor itself."""
        return cls(values.detach(), 0, tuple(values.shape))

    @property
    def elements(self) -> int:
        """Of the whole tensor."""
        return math.prod(self.shape)


def share_out(tensors: Mapping[str, Tensor], rank: int, ranks: int) -> dict[str, Piece]:
    """Of tensors that all ranks have, those that this rank is to write: about as many bytes as every other one.

    Every rank comes to the same distribution by itself.
    """
    load = [0] * ranks
    mine = {}
    for name in sorted(tensors, key=lambda name: (-tensors[name].nbytes, name)):
        writer = load.index(min(load))
        load[writer] += tensors[name].nbytes
        if writer == rank:
            mine[name] = Piece.whole(tensors[name])
    return mine
