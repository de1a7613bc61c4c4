"""A batch, as the training loop gets it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Samples of one rank at one step. All tensors have the same length."""

    images: Tensor  # (B, channels, size, size) float32, normalised, channels last in memory
    labels: Tensor  # (B,) int64; 0 where the label is unknown
    index: Tensor  # (B,) int64: each sample's number for life
    weight: Tensor  # (B,) float32: 1, or 0 for a sample that is unreadable, unlabelled, or fills a gap
    images2: Tensor | None = None  # a second, strongly augmented view

    def __len__(self) -> int:
        return len(self.index)

    def pieces(self, count: int) -> Iterator[Batch]:
        """The batch cut into so many pieces, of equal length up to one sample."""
        columns = {name: value.tensor_split(count) for name, value in vars(self).items() if value is not None}
        for number in range(count):
            yield Batch(**{name: parts[number] for name, parts in columns.items()})

    def to(self, device: torch.device | str) -> Batch:
        """The batch on another device."""
        moved = {name: value.to(device, non_blocking=True) for name, value in vars(self).items() if value is not None}
        return replace(self, **moved)
