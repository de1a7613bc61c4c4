"""Generalised cross-entropy (Zhang and Sabuncu, NeurIPS 2018): (1 - p_y^q) / q.

q = 1 is the mean absolute error, which tolerates wrong labels but learns slowly; q -> 0 is cross-entropy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import ConfigError
from .method import LossMethod, MethodSettings


@dataclass(frozen=True)
class GCESettings(MethodSettings):
    """Generalised cross-entropy."""

    name: Literal["gce"] = "gce"  # generalised cross-entropy
    q: float = 0.7  # in (0, 1]: approaches cross-entropy near 0; 1 is the mean absolute error

    def __post_init__(self) -> None:
        if not 0 < self.q <= 1:
            raise ConfigError(f"method.q = {self.q}: must be more than 0 and at most 1")


class GCE(LossMethod):
    """(1 - p_y^q) / q."""

    Settings = GCESettings

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of each sample."""
        return gce_losses(logits, labels, self.settings.q)


def gce_losses(logits: Tensor, labels: Tensor, q: float = 0.7) -> Tensor:
    """(1 - p_y^q) / q of each sample (B,), for your own loop."""
    log_p = -F.cross_entropy(logits, labels, reduction="none")
    return -(torch.expm1(q * log_p) / q)  # from log p_y: p_y^q has no gradient where p_y underflows
