"""Plain reference versions of the losses that SOP is compared with.

Every loss is called as `loss(logits, labels, index)` with logits (B, K), labels (B,) and index (B,), each sample's
fixed number in [0, N), and returns the mean over the batch. `sopdist.SOP` is called in the same way. Written to be
read, not to be fast; nothing here knows about data or training.

Below, p = softmax(logits) and y is the given label.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def cross_entropy(logits: Tensor, labels: Tensor, _index: Tensor) -> Tensor:
    """CE = -log p_y."""
    return functional.cross_entropy(logits, labels)


@dataclass(frozen=True)
class GCE:
    """Generalised cross-entropy (Zhang and Sabuncu, 2018): (1 - p_y^q) / q.

    q = 1 is the mean absolute error, which forgives wrong labels but learns slowly; q -> 0 is cross-entropy.
    """

    q: float = 0.7

    def __call__(self, logits: Tensor, labels: Tensor, _index: Tensor) -> Tensor:
        """The mean loss of a batch."""
        log_p = -functional.cross_entropy(logits, labels, reduction="none")
        return -(torch.expm1(self.q * log_p) / self.q).mean()  # in log p: p_y^q has no gradient where p_y rounds to 0


@dataclass(frozen=True)
class SL:
    """Symmetric cross-entropy (Wang et al., 2019): alpha CE + beta RCE, RCE = -sum_k p_k log onehot(y)_k.

    With log 0 := log_zero only the classes other than y contribute: RCE = -log_zero (1 - p_y).
    """

    alpha: float = 0.1
    beta: float = 1.0
    log_zero: float = math.log(1e-4)  # the stronger of the usual choices here; -4 loses 2 to 6 points

    def __call__(self, logits: Tensor, labels: Tensor, _index: Tensor) -> Tensor:
        """The mean loss of a batch."""
        ce = functional.cross_entropy(logits, labels, reduction="none")
        rce = self.log_zero * torch.expm1(-ce)  # expm1(-ce) = p_y - 1
        return (self.alpha * ce + self.beta * rce).mean()


class ELR:
    """Early-learning regularisation (Liu et al., 2020): CE + strength log(1 - <p, t>).

    t is the sample's own target, a moving average of its predictions: t <- beta t + (1 - beta) p / sum(p), from 0. It
    is updated before it is used, and is a constant for the gradient. p is clamped to [1e-4, 1 - 1e-4] in both places.
    """

    def __init__(self, num_samples: int, num_classes: int, *, strength: float = 3.0, beta: float = 0.7) -> None:
        self.strength, self.beta = strength, beta
        self.targets = torch.zeros(num_samples, num_classes)

    def __call__(self, logits: Tensor, labels: Tensor, index: Tensor) -> Tensor:
        """The mean loss of a batch; the targets of its samples are updated."""
        p = logits.softmax(dim=1).clamp(1e-4, 1 - 1e-4)
        new = p.detach() / p.detach().sum(dim=1, keepdim=True)
        targets = self.beta * self.targets[index] + (1 - self.beta) * new  # (B, K)
        self.targets[index] = targets.to(self.targets.dtype)
        agreement = (p * targets).sum(dim=1)
        return functional.cross_entropy(logits, labels) + self.strength * torch.log1p(-agreement).mean()
