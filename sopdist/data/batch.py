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
    other_views: tuple[Tensor, ...] = ()  # more views of the same images, in the order in which they were asked for
    part: Tensor | None = None  # (B,) int64: which part of the plan each sample belongs to; None: there is only one

    def __len__(self) -> int:
        return len(self.index)

    def micro_batches(self, count: int) -> Iterator[Batch]:
        """Split the batch into `count` micro-batches whose lengths differ by at most one sample."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        pieces = {name: value.tensor_split(count) for name, value in tensors.items()}
        views = [view.tensor_split(count) for view in self.other_views]
        for i in range(count):
            piece = {name: parts[i] for name, parts in pieces.items()}
            yield replace(self, other_views=tuple(view[i] for view in views), **piece)

    def to(self, device: torch.device | str) -> Batch:
        """Copy the batch to another device."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        moved = {name: value.to(device, non_blocking=True) for name, value in tensors.items()}
        views = tuple(view.to(device, non_blocking=True) for view in self.other_views)
        return replace(self, other_views=views, **moved)
