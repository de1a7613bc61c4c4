"""CORES2 (Cheng et al., ICLR 2021): cross-entropy minus a confidence term, and a sieve for the samples to learn from.

    loss_i = CE_i(y) - beta sum_k r_k CE_i(k)          CE_i(k) = -log p_k
    score_i = CE_i(y) - (1/K) sum_k CE_i(k)            the sieve keeps samples with a score of at most 0

beta rises linearly from 0 at epoch `warmup` to `strength` at epoch `ramp_end`. r are the shares of the classes among
the given labels, without those that the sieve left out in the epoch before. The sieve starts at epoch `sieve_from`; the
loss of a batch is the mean over the samples that it keeps. The learning rate is divided by 1 + beta.

A label is flagged if its score is positive.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from ..data.batch import Batch
from ..errors import ConfigError
from ..sample_table import SampleTable
from .method import Cost, Forward, MethodSettings, Readout, Setup, StepOutput, Trainer
from .table_method import TableMethod
from .verdicts import VerdictTable, give_verdicts, read_verdicts, verdict_cost

TABLE = "sieve"
_TINY = 1e-8  # added to probabilities before their logarithm; published


@dataclass(frozen=True)
class SieveSettings(MethodSettings):
    """The confidence term and the sieve."""

    strength: float = 2.0  # of the confidence term after the ramp
    warmup: int | None = None  # epochs without the confidence term; null: a tenth of train.epochs; published: 10 of 100
    ramp_end: int | None = None  # epoch at which the full strength is reached; null: four tenths; published: 40
    sieve_from: int | None = None  # epochs before the sieve leaves samples out; null: three tenths; published: 31
    divide_lr: bool = True  # divide the learning rate by 1 + beta, as published

    def __post_init__(self) -> None:
        if not 0 <= self.strength < math.inf:
            raise ConfigError(f"method.strength = {self.strength}: must be finite and at least 0")
        for key in ("warmup", "ramp_end", "sieve_from"):
            value = getattr(self, key)
            if value is not None and value < 0:
                raise ConfigError(f"method.{key} = {value}: must be at least 0")


@dataclass(frozen=True)
class CORES2Settings(SieveSettings):
    """Confidence-regularised sample sieve."""

    name: Literal["cores2"] = "cores2"  # confidence-regularised sample sieve


class CORES2(TableMethod):
    """Cross-entropy with a confidence term on the samples that the sieve keeps."""

    Settings: ClassVar[type[MethodSettings]] = CORES2Settings
    settings: SieveSettings

    def full_batch_setting(self) -> str:
        """The loss is the mean over the samples of the full batch that the sieve keeps."""
        return "name"

    def cost(self, samples: int, classes: int) -> Cost:  # noqa: ARG002
        """A score per sample."""
        return Cost(1, (verdict_cost(TABLE),))

    def make_tables(self, setup: Setup, *, first: int, stride: int) -> dict[str, SampleTable]:
        """The score of each sample at its last visit."""
        return {TABLE: VerdictTable(setup, first=first, stride=stride)}

    def start(self, setup: Setup) -> None:
        """Class shares start as those of the given labels."""
        super().start(setup)
        counts = np.bincount(setup.labels[setup.labels >= 0], minlength=setup.classes)
        self._counts = torch.from_numpy(counts.astype(np.float64)).to(setup.device)
        self.shares = self._counts / self._counts.sum().clamp_min(1)  # r
        self.left_out = torch.zeros_like(self._counts)  # of each class, in the current epoch
        self._beta, self._sieving = 0.0, False

    def between_epochs(self, epoch: int, trainer: Trainer) -> None:
        """Recompute the class shares without the samples that were left out."""
        super().between_epochs(epoch, trainer)
        kept = (self._counts - self.left_out).clamp_min(0)
        if kept.sum() > 0:
            self.shares.copy_(kept / kept.sum())
        self.left_out.zero_()

    def begin_epoch(self, epoch: int) -> None:
        """Set the strength of the confidence term, and whether the sieve is on."""
        self._beta = self.beta(epoch)
        self._sieving = epoch >= self._epochs_of(self.settings.sieve_from, 0.3)

    def beta(self, epoch: int) -> float:
        """The strength of the confidence term in this epoch."""
        warmup = self._epochs_of(self.settings.warmup, 0.1)
        end = max(self._epochs_of(self.settings.ramp_end, 0.4), warmup + 1)
        return self.settings.strength * min(max((epoch - warmup) / (end - warmup), 0.0), 1.0)

    def lr_factor(self, epoch: int) -> float:
        """1 / (1 + beta)."""
        return 1 / (1 + self.beta(epoch)) if self.settings.divide_lr else 1.0

    def step(self, forward: Forward, batch: Batch) -> StepOutput:
        """The mean over the samples of the global batch that the sieve keeps."""
        logits = forward(batch.images)
        finite = torch.isfinite(logits).all(dim=1)
        safe = logits.float().where(finite[:, None], 0)
        counts = (batch.weight > 0) & finite
        losses, scores = cores2_losses(safe, batch.labels, self.shares.float(), self._beta)
        kept = counts & (scores <= 0) if self._sieving else counts
        left_out = torch.bincount(batch.labels[counts & ~kept], minlength=len(self.shares)).double()
        totals = self.batch.sum(torch.cat([kept.sum().double()[None], left_out]))
        self.left_out += totals[1:]
        loss = (losses * kept).sum() / totals[0].clamp_min(1).float()
        give_verdicts(self.shared[TABLE], batch.index, scores, safe.detach().argmax(1), counts)
        return StepOutput(self.scaled_to_batch(loss, batch.weight), logits, finite)

    def state_dict(self) -> dict[str, Tensor]:
        """The class shares, and the samples left out so far in the epoch."""
        return super().state_dict() | {"shares": self.shares, "left_out": self.left_out}

    def readout(self, labels: Tensor) -> Readout:
        """Labels with a positive score."""
        return read_verdicts(self.shared[TABLE], labels, 0.0)

    def _epochs_of(self, setting: int | None, share: float) -> int:
        return math.ceil(share * self.sieve_epochs()) if setting is None else setting

    def sieve_epochs(self) -> int:
        """The epochs of the run that train with the sieve."""
        return self.setup.epochs


def cores2_losses(logits: Tensor, labels: Tensor, shares: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """The loss and the score of each sample, (B,), for your own loop; `shares` (K,) are the class shares.

    Leave out samples with a positive score.
    """
    negative_log = -(logits.softmax(1) + _TINY).log()  # CE_i(k), (B, K)
    own = negative_log.gather(1, labels[:, None])[:, 0]
    return own - beta * (negative_log @ shares), (own - negative_log.mean(1)).detach()
