"""Plain cross-entropy: -log p_y. The usual baseline, which memorises wrong labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from .method import LossMethod, MethodSettings


@dataclass(frozen=True)
class CESettings(MethodSettings):
    """Plain cross-entropy."""

    name: Literal["ce"] = "ce"  # plain cross-entropy


class CrossEntropy(LossMethod):
    """-log p_y."""

    Settings = CESettings

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """-log p_y of each sample."""
        return F.cross_entropy(logits, labels, reduction="none")
