"""SOP and SOP+ for the training loop: the loss of `sopdist.noise`, with rows that travel a step ahead."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from ..config import ConfigError
from ..data.batch import Batch
from ..data.plan import rank_columns, without_gaps
from ..noise import SOP
from ..noise.exchange import ExchangeStats
from ..noise.rates import Paper
from .settings import ObjectiveSettings


class NoiseAware:
    """SOP, and with `consistency` or `balance` SOP+."""

    sop: SOP  # the table's rows are dealt to the ranks of the group

    def __init__(
        self,
        settings: ObjectiveSettings,
        *,
        samples: int,
        classes: int,
        seed: int,
        device: torch.device,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._ahead, self._ranks = settings.ahead, 1 if group is None else dist.get_world_size(group)
        rates = {name: getattr(settings, name) for name in ("visits", "alpha_u", "alpha_v", "lr_u", "lr_v")}
        try:
            self.sop = SOP(
                samples,
                classes,
                variant=settings.variant,
                **rates,
                batch_size=settings.lr_batch,
                layout=settings.layout,
                slots=settings.slots,
                seed=seed,
                eps=settings.eps,
                consistency=settings.consistency,
                balance=settings.balance,
                reduction="sum",
                validate=False,  # the stream has checked labels and indices, and checking waits for a GPU
                device=device,
                process_group=group,
            )
        except ValueError as error:
            raise ConfigError(f"objective: {error}") from None

    def expect(self, row: NDArray[np.integer[Any]]) -> None:
        """Start sending the rows of the noise table that this row of the plan needs."""
        if self._ranks > 1 and self._ahead:
            filled = without_gaps(row)
            self.sop.expect([filled[rank_columns(len(row), rank, self._ranks)] for rank in range(self._ranks)])

    def set_rate(self, rate: float) -> None:
        """The variant `paper` moves u and v in proportion to it."""
        if isinstance(self.sop.rates, Paper):
            self.sop.tau = rate

    def loss(self, logits: Tensor, piece: Batch, logits2: Tensor | None) -> Tensor:
        """The loss of SOP; facts for the noise table are on their way when the last piece is done."""
        loss: Tensor = self.sop(logits, piece.labels, piece.index, logits2=logits2, weight=piece.weight)
        return loss

    def settle(self) -> None:
        """Update the rows of the noise table that this rank owns."""
        self.sop.settle()

    def drain(self) -> None:
        """Wait for rows under way, and drop them."""
        if self.sop.exchange is not None:
            self.sop.exchange.drain()

    def costs(self) -> ExchangeStats:
        """What rows and facts have cost so far."""
        return ExchangeStats() if self.sop.exchange is None else self.sop.exchange.stats()
