"""Two networks side by side in one module, for methods in which they teach each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from .method import Forward
from .table_method import TableMethod

FIRST, SECOND = "first", "second"  # names of the networks in the module


class Pair(nn.Module):
    """Two networks in one module, so that every engine and checkpoint handles both."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, images: Tensor, others: Tensor | None = None) -> Tensor:
        """Logits of the first network on `images`, then of the second on `others`, or also on `images`: (B + B', K)."""
        return torch.cat([self.first(images), self.second(images if others is None else others)])


class PairMethod(TableMethod):
    """A method with two networks. Predictions are the mean of their logits."""

    network: Pair

    def build_network(self, make: Callable[[], nn.Module]) -> nn.Module:
        """Two backbones with different initial weights."""
        self.network = Pair(make(), make())
        return self.network

    def backbone_weights(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The weights of the first network."""
        prefix = f"{FIRST}."
        return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}

    def predict(self, forward: Forward, images: Tensor) -> Tensor:
        """The mean of both networks' logits."""
        return both(forward(images)).mean(0)


def both(logits: Tensor) -> Tensor:
    """The logits of both networks on the same images, (2, B, K), from the output of `Pair`."""
    return logits.unflatten(0, (2, -1))
