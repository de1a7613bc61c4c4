"""What the training loop asks of an objective."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..data.batch import Batch
from ..noise import SOP
from ..noise.exchange import ExchangeStats


class Objective(Protocol):
    """Something to minimise. On several ranks, all of them make the same calls in the same order."""

    @property
    def sop(self) -> SOP | None:
        """The noise table behind it, if there is one."""

    def expect(self, row: NDArray[np.integer[Any]]) -> None:
        """The plan's row of the next step is this one: what it needs may be sent ahead."""

    def set_rate(self, rate: float) -> None:
        """The network's learning rate from now on."""

    def loss(self, logits: Tensor, piece: Batch, logits2: Tensor | None) -> Tensor:
        """The loss of (a piece of) this rank's batch: the *sum* over its samples, each times its weight.

        A sample whose logits are not finite adds nothing, neither to the loss nor to the gradient.
        """

    def settle(self) -> None:
        """The backward pass is over: finish what was sent during it."""

    def drain(self) -> None:
        """The row that was expected will not come: finish what was sent for it."""

    def costs(self) -> ExchangeStats:
        """What talking to other ranks has cost so far."""
