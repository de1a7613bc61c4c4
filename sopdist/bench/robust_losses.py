"""The losses that SOP is compared with, for the benchmark's own loop. Independent of data and training.

Every loss is called as `loss(logits, labels, index)` with logits (B, K), labels (B,) and sample indices (B,) in [0, N),
and returns the mean over the batch, as `sopdist.SOP` does. The code favours readability over speed.

Below, p = softmax(logits) and y is the given label.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ..methods.gce import gce_losses
from ..methods.sl import LOG_ZERO, sl_losses

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def cross_entropy(logits: Tensor, labels: Tensor, _index: Tensor) -> Tensor:
    """CE = -log p_y."""
    return functional.cross_entropy(logits, labels)


@dataclass(frozen=True)
class GCE:
    """Generalised cross-entropy, as in `sopdist.methods.gce`."""

    q: float = 0.7

    def __call__(self, logits: Tensor, labels: Tensor, _index: Tensor) -> Tensor:
        """Mean loss of a batch."""
        return gce_losses(logits, labels, self.q).mean()


@dataclass(frozen=True)
class SL:
    """Symmetric cross-entropy, as in `sopdist.methods.sl`."""

    alpha: float = 0.1
    beta: float = 1.0
    log_zero: float = LOG_ZERO  # log 1e-4, the better of the usual choices here; -4 costs 2 to 6 points

    def __call__(self, logits: Tensor, labels: Tensor, _index: Tensor) -> Tensor:
        """Mean loss of a batch."""
        return sl_losses(logits, labels, self.alpha, self.beta, self.log_zero).mean()


class ELR:
    """Early-learning regularisation (Liu et al., 2020): CE + strength log(1 - <p, t>).

    Each sample has a target t, a moving average of its predictions: t <- beta t + (1 - beta) p / sum(p), starting at 0.
    The target is updated before its use and treated as a constant by the gradient. p is clamped to [1e-4, 1 - 1e-4] in
    both places.
    """

    def __init__(self, num_samples: int, num_classes: int, *, strength: float = 3.0, beta: float = 0.7) -> None:
        self.strength, self.beta = strength, beta
        self.targets = torch.zeros(num_samples, num_classes)

    def __call__(self, logits: Tensor, labels: Tensor, index: Tensor) -> Tensor:
        """Mean loss of a batch; also updates the targets of its samples."""
        p = logits.softmax(dim=1).clamp(1e-4, 1 - 1e-4)
        new = p.detach() / p.detach().sum(dim=1, keepdim=True)
        targets = self.beta * self.targets[index] + (1 - self.beta) * new  # (B, K)
        self.targets[index] = targets.to(self.targets.dtype)
        agreement = (p * targets).sum(dim=1)
        return functional.cross_entropy(logits, labels) + self.strength * torch.log1p(-agreement).mean()
