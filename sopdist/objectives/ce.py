"""Plain cross-entropy: what everybody uses, and what memorises wrong labels."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ..data.batch import Batch
from ..noise import SOP
from ..noise.exchange import ExchangeStats


class CrossEntropy:
    """Keeps nothing from step to step."""

    sop: SOP | None = None

    def expect(self, row: NDArray[np.integer[Any]]) -> None:
        """Needs nothing."""

    def set_rate(self, rate: float) -> None:
        """Does not depend on it."""

    def loss(self, logits: Tensor, piece: Batch, logits2: Tensor | None) -> Tensor:  # noqa: ARG002 - has one view
        """Weighted sum over the samples whose logits are finite."""
        finite = torch.isfinite(logits).all(dim=1)
        losses = F.cross_entropy(logits.float().where(finite[:, None], 0), piece.labels, reduction="none")
        return (losses * piece.weight.where(finite, 0)).sum()

    def settle(self) -> None:
        """Sends nothing."""

    def drain(self) -> None:
        """Sends nothing."""

    def costs(self) -> ExchangeStats:
        """Nothing: it talks to nobody."""
        return ExchangeStats()
