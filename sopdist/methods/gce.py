"""Generalised cross-entropy (Zhang and Sabuncu, NeurIPS 2018): (1 - p_y^q) / q. Also truncated.

q = 1 is the mean absolute error, which tolerates wrong labels but learns slowly; q -> 0 is cross-entropy.

Truncated, with `truncate` = k > 0: samples whose p_y is at most k are left out. (In the paper they have a constant
loss, from which nothing is learned either.) Between epochs, from epoch `prune_from` on, the network that was best so
far on a holdout with noisy labels decides which samples these are. Their labels are flagged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..data.batch import Batch
from ..data.parts import Part
from ..errors import ConfigError
from ..sample_table import SampleTable
from .holdout import Holdout, errors
from .method import Cost, Forward, MethodSettings, Readout, Setup, StepOutput, Trainer
from .table_method import TableMethod
from .verdicts import VerdictTable, read_verdicts, verdict_cost

TABLE = "pruned"


@dataclass(frozen=True)
class GCESettings(MethodSettings):
    """Generalised cross-entropy, plain or truncated."""

    name: Literal["gce"] = "gce"  # generalised cross-entropy
    q: float = 0.7  # in (0, 1]: approaches cross-entropy near 0; 1 is the mean absolute error
    truncate: float = 0.0  # p_y up to which a sample is left out; published: 0.5; 0: no truncation
    prune_from: int | None = None  # truncated: epoch of the first decision; null: a third of train.epochs
    prune_every: int = 10  # truncated: epochs between decisions
    holdout: float = 0.1  # truncated: share of the samples on which the network that decides is chosen

    def __post_init__(self) -> None:
        if not 0 < self.q <= 1:
            raise ConfigError(f"method.q = {self.q}: must be more than 0 and at most 1")
        if not 0 <= self.truncate < 1:
            raise ConfigError(f"method.truncate = {self.truncate}: must be at least 0 and less than 1")
        if self.prune_from is not None and self.prune_from < 0:
            raise ConfigError(f"method.prune_from = {self.prune_from}: must be at least 0")
        if self.prune_every < 1:
            raise ConfigError(f"method.prune_every = {self.prune_every}: must be at least 1")
        if not 0 < self.holdout < 1:
            raise ConfigError(f"method.holdout = {self.holdout}: must be more than 0 and less than 1")


class GCE(TableMethod):
    """(1 - p_y^q) / q."""

    Settings = GCESettings
    settings: GCESettings

    def cost(self, samples: int, classes: int) -> Cost:  # noqa: ARG002
        """Truncated: a score per sample."""
        return Cost(1, (verdict_cost(TABLE),) if self.settings.truncate else ())

    def make_tables(self, setup: Setup, *, first: int, stride: int) -> dict[str, SampleTable]:
        """Truncated: 1 - p_y, as last decided."""
        return {TABLE: VerdictTable(setup, first=first, stride=stride)} if self.settings.truncate else {}

    def start(self, setup: Setup) -> None:
        """Truncated: the holdout."""
        super().start(setup)
        self.holdout = Holdout(setup, self.settings.holdout, errors) if self.settings.truncate else None

    def between_epochs(self, epoch: int, trainer: Trainer) -> None:
        """Truncated: look for the best network, and let it decide when a decision is due."""
        super().between_epochs(epoch, trainer)
        if self.holdout is None or not epoch:
            return
        self.holdout.consider(trainer)
        first = self.setup.epochs // 3 if self.settings.prune_from is None else self.settings.prune_from
        if epoch < first or (epoch - first) % self.settings.prune_every:
            return
        current = trainer.weights()
        trainer.load_weights(self.holdout.best)
        found = trainer.predictions(_doubt_and_class)  # (N, 2)
        trainer.load_weights(current)
        table = self.shared[TABLE].table
        assert isinstance(table, VerdictTable)
        mine = found[table.samples_of(slice(None))]
        rows = torch.arange(len(mine), device=mine.device)
        table.update(rows, [mine[:, 0], mine[:, 1].nan_to_num().to(torch.int32), torch.isfinite(mine[:, 0])])

    def parts(self, epoch: int) -> tuple[Part, ...]:  # noqa: ARG002
        """Truncated: without the holdout and the samples that are left out."""
        if self.holdout is None:
            return (Part(),)
        shared = self.shared[TABLE]
        assert isinstance(shared.table, VerdictTable)
        score, visits = (shared.gather(column).cpu().numpy() for column in (shared.table.score, shared.table.visits))
        out = (visits > 0) & (score >= 1 - self.settings.truncate)
        kept = np.setdiff1d(np.flatnonzero(~out), self.holdout.samples, assume_unique=True)
        return (Part(kept if len(kept) else self.holdout.others),)

    def step(self, forward: Forward, batch: Batch) -> StepOutput:
        """The weighted sum over the samples whose logits are finite."""
        logits = forward(batch.images)
        finite = torch.isfinite(logits).all(dim=1)
        losses = gce_losses(logits.float().where(finite[:, None], 0), batch.labels, self.settings.q)
        for shared in self.shared.values():  # read and changed only between epochs
            shared.rows(batch.index)
            shared.skip(len(batch))
        return StepOutput((losses * batch.weight.where(finite, 0)).sum(), logits, finite)

    def state_dict(self) -> dict[str, Tensor]:
        """Truncated: the best network so far."""
        return super().state_dict() | ({} if self.holdout is None else self.holdout.state_dict())

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore it. Checkpoints of earlier versions have no state."""
        if self.holdout is not None:
            self.holdout.load_state_dict(state)
        if "counters" in state:
            self.batch.counters.copy_(state["counters"])

    def readout(self, labels: Tensor) -> Readout | None:
        """Truncated: the labels that are left out."""
        limit = 1 - self.settings.truncate
        return read_verdicts(self.shared[TABLE], labels, limit, inclusive=True) if self.settings.truncate else None


def _doubt_and_class(logits: Tensor, labels: Tensor) -> Tensor:
    """1 - p_y, and the predicted class: (B, 2)."""
    p = logits.softmax(1)
    return torch.stack([1 - p.gather(1, labels[:, None])[:, 0], p.argmax(1).float()], dim=1)


def gce_losses(logits: Tensor, labels: Tensor, q: float = 0.7) -> Tensor:
    """(1 - p_y^q) / q of each sample (B,), for your own loop."""
    log_p = -F.cross_entropy(logits, labels, reduction="none")
    return -(torch.expm1(q * log_p) / q)  # from log p_y: p_y^q has no gradient where p_y underflows
