"""Symmetric cross-entropy (Wang et al., ICCV 2019): alpha CE + beta RCE, with RCE = -sum_k p_k log onehot(y)_k.

With log 0 := log_zero, only classes other than y contribute: RCE = -log_zero (1 - p_y).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import ConfigError
from .method import LossMethod, MethodSettings

LOG_ZERO = math.log(1e-4)


@dataclass(frozen=True)
class SLSettings(MethodSettings):
    """Symmetric cross-entropy."""

    name: Literal["sl"] = "sl"  # symmetric cross-entropy
    alpha: float = 0.1  # weight of the cross-entropy; published: 0.1 for CIFAR-10, 6 for CIFAR-100
    beta: float = 1.0  # weight of the reverse cross-entropy; published: 1 for CIFAR-10, 0.1 for CIFAR-100
    log_zero: float = LOG_ZERO  # what log 0 stands for in the reverse cross-entropy; published: -4 or log 1e-4

    def __post_init__(self) -> None:
        for key in ("alpha", "beta"):
            if not 0 <= getattr(self, key) < math.inf:
                raise ConfigError(f"method.{key} = {getattr(self, key)}: must be a finite number of at least 0")
        if not -math.inf < self.log_zero < 0:
            raise ConfigError(f"method.log_zero = {self.log_zero}: must be a finite number below 0")


class SL(LossMethod):
    """alpha CE + beta RCE."""

    Settings = SLSettings

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of each sample."""
        return sl_losses(logits, labels, self.settings.alpha, self.settings.beta, self.settings.log_zero)


def sl_losses(
    logits: Tensor, labels: Tensor, alpha: float = 0.1, beta: float = 1.0, log_zero: float = LOG_ZERO
) -> Tensor:
    """alpha CE + beta RCE of each sample (B,), for your own loop."""
    ce = F.cross_entropy(logits, labels, reduction="none")
    return alpha * ce + beta * log_zero * torch.expm1(-ce)  # expm1(-ce) = p_y - 1
