"""CORES2* (Cheng et al., ICLR 2021): CORES2, then a new network that uses the samples left out, but not their labels.

The first `sieve_epochs` epochs are CORES2. Its scores then divide the samples permanently, and a fresh network
learns, with strongly augmented views,

    CE(p(strong), y) on the samples kept + consistency KL(p(weak) || p(strong)) on the others; p(weak) has no gradient

Both stages use the optimizer of the config; its schedule restarts with the second one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..data.augment.policy import Policy
from ..data.batch import Batch
from ..data.parts import Part
from ..errors import ConfigError
from .cores2 import CORES2, TABLE, SieveSettings
from .method import BatchLayout, Cost, Forward, Setup, StepOutput, Trainer
from .verdicts import VerdictTable

_UNLABELLED = 1  # index of the part of a batch with the samples left out


@dataclass(frozen=True)
class CORES2StarSettings(SieveSettings):
    """CORES2, then consistency training on the samples left out."""

    name: Literal["cores2_star"] = "cores2_star"  # CORES2, then consistency training on what it left out
    sieve_epochs: int | None = None  # epochs of CORES2 in the first stage; null: a third of train.epochs
    consistency: float = 0.4  # weight of the samples left out; published: 0.2, 0.4, 0.9 at noise rates 0.2, 0.4, 0.6
    unlabelled: float = 1 / 3  # their share of a batch; published: 0.2, 1/3, 3/7 at these noise rates

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sieve_epochs is not None and self.sieve_epochs < 1:
            raise ConfigError(f"method.sieve_epochs = {self.sieve_epochs}: must be at least 1")
        if not 0 <= self.consistency < float("inf"):
            raise ConfigError(f"method.consistency = {self.consistency}: must be finite and at least 0")
        if not 0 < self.unlabelled < 1:
            raise ConfigError(f"method.unlabelled = {self.unlabelled}: must be more than 0 and less than 1")


class CORES2Star(CORES2):
    """Two stages: the sieve, then a fresh network on what it kept and left out."""

    Settings = CORES2StarSettings
    settings: CORES2StarSettings

    def views(self) -> tuple[Policy | None, ...]:
        """A weak and a strong view."""
        return (None, Policy())

    def batch_layout(self, batch: int) -> BatchLayout:
        """In the second stage, some columns are for the samples left out."""
        if batch < 2:
            raise ConfigError(f"train.batch = {batch}: method.name = cores2_star needs at least 2")
        return BatchLayout(batch - self._columns(batch), batch)

    def _columns(self, batch: int) -> int:
        """The number of columns for the samples left out."""
        return min(max(1, round(batch * self.settings.unlabelled)), batch - 1)

    def stages(self, epochs: int) -> tuple[int, ...]:
        """The sieve, and the rest."""
        first = self._first_stage(epochs)
        return (first, epochs - first) if first < epochs else (epochs,)

    def _first_stage(self, epochs: int) -> int:
        wanted = self.settings.sieve_epochs
        return min(epochs, max(1, epochs // 3) if wanted is None else wanted)

    def sieve_epochs(self) -> int:
        """The epochs of the first stage."""
        return self._first_stage(self.setup.epochs)

    def cost(self, samples: int, classes: int) -> Cost:
        """Two views in the second stage."""
        return Cost(2, super().cost(samples, classes).tables)

    def start(self, setup: Setup) -> None:
        """Every sample starts as kept."""
        super().start(setup)
        wanted = self.settings.sieve_epochs
        if wanted is not None and wanted >= setup.epochs:
            raise ConfigError(f"method.sieve_epochs = {wanted}: must be less than train.epochs = {setup.epochs}")
        self.kept = torch.ones(setup.samples, dtype=torch.uint8)
        self._second_stage = False

    def between_epochs(self, epoch: int, trainer: Trainer) -> None:
        """Between the stages: divide the samples, and start with a new network."""
        super().between_epochs(epoch, trainer)
        if epoch == self.sieve_epochs():
            shared = self.shared[TABLE]
            assert isinstance(shared.table, VerdictTable)
            visits, score = (shared.gather(column) for column in (shared.table.visits, shared.table.score))
            kept = (visits > 0) & (score <= 0)
            self.kept.copy_(kept if kept.any() else torch.ones_like(kept))
            trainer.restart()

    def fingerprint(self) -> dict[str, Any]:
        """The length of the first stage, which depends on `train.epochs` unless it is set."""
        return {"sieve_epochs": self.sieve_epochs()}

    def begin_epoch(self, epoch: int) -> None:
        """Set which stage this is."""
        super().begin_epoch(epoch)
        self._second_stage = epoch >= self.sieve_epochs()

    def beta(self, epoch: int) -> float:
        """0 in the second stage."""
        return super().beta(epoch) if epoch < self.sieve_epochs() else 0.0

    def parts(self, epoch: int) -> tuple[Part, ...]:
        """All samples; in the second stage, those kept and those left out."""
        if epoch < self.sieve_epochs():
            return (Part(),)
        kept, left_out = (np.flatnonzero(self.kept.numpy() == value) for value in (1, 0))
        if not len(left_out):
            return (Part(),)
        columns = self._columns(self.setup.batch)
        return Part(kept, self.setup.batch - columns), Part(left_out, columns)

    def step(self, forward: Forward, batch: Batch) -> StepOutput:
        """CORES2 on the weak view, or cross-entropy and consistency."""
        if not self._second_stage:
            return super().step(forward, batch)
        (strong,) = batch.other_views
        labelled = torch.ones_like(batch.index, dtype=torch.bool) if batch.part is None else batch.part != _UNLABELLED
        weak_logits, logits = forward(torch.cat([batch.images, strong])).tensor_split(2)
        finite = torch.isfinite(weak_logits).all(1) & torch.isfinite(logits).all(1)
        weak_logits, safe = (each.float().where(finite[:, None], 0) for each in (weak_logits, logits))
        counts = (batch.weight > 0) & finite
        wanted = weak_logits.detach().softmax(1)
        log_p = safe.log_softmax(1)
        divergence = F.kl_div(log_p, wanted, reduction="none").sum(1)
        losses = torch.where(labelled, F.nll_loss(log_p, batch.labels, reduction="none"), divergence)
        sizes = self.batch.sum(torch.stack([(counts & labelled).sum(), (counts & ~labelled).sum()]).float())
        scale = torch.where(labelled, 1 / sizes[0].clamp_min(1), self.settings.consistency / sizes[1].clamp_min(1))
        self.shared[TABLE].rows(batch.index)
        self.shared[TABLE].skip(len(batch))
        loss = (losses * scale * counts).sum()
        return StepOutput(self.scaled_to_batch(loss, batch.weight), weak_logits, finite)

    def state_dict(self) -> dict[str, Tensor]:
        """The samples that were kept."""
        return super().state_dict() | {"kept": self.kept}
