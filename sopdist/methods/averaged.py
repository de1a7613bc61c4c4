"""A network with a moving average of its weights, which predicts. For methods that want one: see `Averaged`."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

_AVERAGE = "average."


class Averaged(nn.Module):
    """Trains `network`; in evaluation mode, `average` predicts.

    Both are children of one module, so that every engine and checkpoint carries them. `average` has no gradients.
    """

    def __init__(self, network: nn.Module, decay: float) -> None:
        super().__init__()
        self.network, self.average = network, copy.deepcopy(network).requires_grad_(False)
        self._decay = decay

    def forward(self, images: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = (self.network if self.training else self.average)(images)
        return logits

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the network. Call it after every step."""
        for average, current in zip(self.average.parameters(), self.network.parameters(), strict=True):
            average.lerp_(current, 1 - self._decay)
        for kept, buffer in zip(self.average.buffers(), self.network.buffers(), strict=True):
            if kept.is_floating_point():
                kept.lerp_(buffer, 1 - self._decay)
            else:
                kept.copy_(buffer)


def average_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of all weights of an `Averaged`, those of the average, by the names of the network."""
    return {name.removeprefix(_AVERAGE): value for name, value in weights.items() if name.startswith(_AVERAGE)}
