"""A batch, as the stream yields it to the training loop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """The samples of one rank at one step. All tensors have the same length."""

    images: Tensor  # (B, channels, size, size) float32, normalised, channels last in memory
    labels: Tensor  # (B,) int64; 0 where the label is unknown
    index: Tensor  # (B,) int64: sample indices, the same in every run
    weight: Tensor  # (B,) float32: 1, or 0 for samples that are unreadable, unlabelled or padding
    images2: Tensor | None = None  # a second, strongly augmented view

    def __len__(self) -> int:
        return len(self.index)

    def micro_batches(self, count: int) -> Iterator[Batch]:
        """Split the batch into `count` micro-batches whose lengths differ by at most one sample."""
        columns = {name: value.tensor_split(count) for name, value in vars(self).items() if value is not None}
        for i in range(count):
            yield Batch(**{name: parts[i] for name, parts in columns.items()})

    def to(self, device: torch.device | str) -> Batch:
        """Copy the batch to another device."""
        moved = {name: value.to(device, non_blocking=True) for name, value in vars(self).items() if value is not None}
        return replace(self, **moved)
