"""The losses that SOP is compared with, for the benchmark's own loop. Independent of data and training.

Every loss is called as `loss(logits, labels, index)` with logits (B, K), labels (B,) and sample indices (B,) in [0, N),
and returns the mean over the batch, as `sopdist.SOP` does. The code favours readability over speed.

Below, p = softmax(logits) and y is the given label.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from ..methods.elr import ELR
from ..methods.gce import gce_losses
from ..methods.sl import LOG_ZERO, sl_losses

__all__ = ["ELR", "GCE", "SL", "Loss", "cross_entropy"]

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
