"""Co-teaching+ (Yu et al., ICML 2019): Co-teaching among the samples on which the two networks disagree.

During the first `warmup` epochs it is Co-teaching. After that, only samples whose predicted classes differ take part.
If there are none, both networks learn from the whole batch while epoch x step < `agree_steps`, later from nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..errors import ConfigError
from .coteaching import Coteaching, SelectionSettings


@dataclass(frozen=True)
class CoteachingPlusSettings(SelectionSettings):
    """Co-teaching among the samples on which the networks disagree."""

    name: Literal["coteaching_plus"] = "coteaching_plus"  # Co-teaching where the networks disagree
    warmup: int | None = None  # epochs of Co-teaching; published: 20, 5 for CIFAR-100; null: a tenth of train.epochs
    agree_steps: int = 5000  # if the networks agree, learn from the whole batch while epoch x step is less than this
    double_softmax: bool = False  # apply softmax twice after the warm-up, as the authors' code does

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("warmup", "agree_steps"):
            value = getattr(self, key)
            if value is not None and value < 0:
                raise ConfigError(f"method.{key} = {value}: must be at least 0")


class CoteachingPlus(Coteaching):
    """Co-teaching among the samples on which the networks disagree."""

    Settings = CoteachingPlusSettings
    settings: CoteachingPlusSettings
    _epoch = 0
    _disagree = False

    def begin_epoch(self, epoch: int) -> None:
        """Set whether only disagreements count."""
        super().begin_epoch(epoch)
        warmup = self.settings.warmup
        self._epoch = epoch
        self._disagree = epoch >= (self.setup.epochs // 10 if warmup is None else warmup)

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The losses of both networks, (2, B)."""
        twice = self._disagree and self.settings.double_softmax
        return super().losses(logits.softmax(2) if twice else logits, labels)

    def candidates(self, predicted: Tensor, counts: Tensor) -> tuple[Tensor, float | Tensor]:
        """The samples on which the networks disagree, if there are any."""
        if not self._disagree:
            return counts, self.forget
        differ = counts & (predicted[0] != predicted[1])
        early = self._epoch * self.batch.step_of_epoch < self.settings.agree_steps
        otherwise = counts if early else torch.zeros_like(counts)
        disagree = differ.any()
        return torch.where(disagree, differ, otherwise), torch.where(disagree, self.forget, 0.0)
