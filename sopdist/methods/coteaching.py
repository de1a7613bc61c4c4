"""Co-teaching (Han et al., NeurIPS 2018): two networks that choose samples with small losses for each other.

In epoch e both networks leave out the share f(e) of the batch with the largest losses, and each learns from what the
other one keeps: loss_a = mean CE_a over the samples that b keeps. f rises linearly from 0 to `forget` within `ramp`
epochs. The choice is made over the batch of all ranks.

A label is flagged if its loss is among the large ones more often than not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..data.batch import Batch
from ..errors import ConfigError
from ..sample_table import SampleTable
from .method import Cost, Forward, MethodSettings, Readout, Setup, StepOutput
from .pair import PairMethod, both
from .verdicts import VerdictTable, give_verdicts, read_verdicts, verdict_cost

TABLE = "left_out"
KEEP = 0.8  # decay of the share of visits in which a sample was left out: about the last five count


@dataclass(frozen=True)
class SelectionSettings(MethodSettings):
    """How many samples two networks leave out."""

    forget: float = 0.2  # share of samples left out after the ramp; published: the true noise rate
    ramp: int | None = None  # epochs over which that share rises from 0; null: 10, or a tenth of train.epochs if less
    exponent: float = (
        1.0  # 1: the share rises to `forget`; otherwise to forget^exponent, and is `forget` after the ramp
    )
    ensemble: bool = False  # predict with both networks; published: with one

    def __post_init__(self) -> None:
        if not 0 <= self.forget < 1:
            raise ConfigError(f"method.forget = {self.forget}: must be at least 0 and less than 1")
        if self.ramp is not None and self.ramp < 1:
            raise ConfigError(f"method.ramp = {self.ramp}: must be at least 1")
        if not 0 < self.exponent < math.inf:
            raise ConfigError(f"method.exponent = {self.exponent}: must be finite and more than 0")


@dataclass(frozen=True)
class CoteachingSettings(SelectionSettings):
    """Co-teaching."""

    name: Literal["coteaching"] = "coteaching"  # two networks choose small losses for each other


class Coteaching(PairMethod):
    """Two networks choose small losses for each other."""

    Settings: ClassVar[type[MethodSettings]] = CoteachingSettings
    settings: SelectionSettings
    forget = 0.0  # in the current epoch

    def full_batch_setting(self) -> str:
        """Losses are compared over the full batch."""
        return "name"

    def predict(self, forward: Forward, images: Tensor) -> Tensor:
        """The first network, or the mean of both."""
        logits = both(forward(images))
        return logits.mean(0) if self.settings.ensemble else logits[0]

    def cost(self, samples: int, classes: int) -> Cost:  # noqa: ARG002
        """Both networks on every image; a score per sample."""
        return Cost(2, (verdict_cost(TABLE),))

    def make_tables(self, setup: Setup, *, first: int, stride: int) -> dict[str, SampleTable]:
        """How often each sample is left out."""
        return {TABLE: VerdictTable(setup, first=first, stride=stride, keep=KEEP)}

    def begin_epoch(self, epoch: int) -> None:
        """Set the share to leave out."""
        settings = self.settings
        ramp = settings.ramp or max(1, min(10, self.setup.epochs // 10))
        reached = settings.forget**settings.exponent
        self.forget = reached * epoch / max(ramp - 1, 1) if epoch < ramp else settings.forget

    def step(self, forward: Forward, batch: Batch) -> StepOutput:
        """Each network learns from the samples that the other one keeps."""
        logits = both(forward(batch.images))  # (2, B, K)
        finite = torch.isfinite(logits).all(2).all(0)
        safe = logits.float().where(finite[None, :, None], 0)
        counts = (batch.weight > 0) & finite
        losses = self.losses(safe, batch.labels)  # (2, B)
        everyone = self.batch
        all_losses = everyone.gather(losses.T.contiguous()).T  # (2, global batch)
        predicted = everyone.gather(safe.argmax(2).T.contiguous()).T
        usable = everyone.gather(counts.float()) > 0
        candidates, forget = self.candidates(predicted, usable)
        kept = torch.stack([smallest(row, candidates, forget) for row in all_losses])  # (2, global batch)
        mine = kept[:, everyone.mine].flip(0)  # each network gets the choice of the other
        sizes = kept.sum(1).flip(0).clamp_min(1)
        loss = ((losses * mine).sum(1) / sizes).sum()
        small = torch.stack([smallest(row, usable, self.forget) for row in all_losses])  # among all samples
        left_out = 1 - small[:, everyone.mine].float().mean(0)
        give_verdicts(
            self.shared[TABLE], batch.index, left_out, safe.detach().mean(0).argmax(1), counts & (self.forget > 0)
        )
        return StepOutput(self.scaled_to_batch(loss, batch.weight), safe[0], finite)

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The losses of both networks, (2, B), from logits (2, B, K)."""
        return torch.stack([F.cross_entropy(each, labels, reduction="none") for each in logits])

    def candidates(self, predicted: Tensor, counts: Tensor) -> tuple[Tensor, float | Tensor]:  # noqa: ARG002
        """Of the global batch, the samples (B,) to choose from, and the share of them to leave out.

        `predicted` (2, B) are the classes that both networks predict, `counts` (B,) the samples that can be used.
        """
        return counts, self.forget

    def readout(self, labels: Tensor) -> Readout:
        """Labels whose loss was among the large ones more often than not."""
        return read_verdicts(self.shared[TABLE], labels, 0.5)


def smallest(losses: Tensor, candidates: Tensor, forget: float | Tensor) -> Tensor:
    """Which of the candidates (B,) remain when the share `forget` with the largest losses is left out.

    If none would remain, all do. Equal losses are ranked in the order of the batch. Does not wait for a GPU.
    """
    count = candidates.sum()
    keep = ((1 - forget) * count.double() + 1e-9).floor()  # (1 - 0.9) 10 is less than 1 in floating point
    keep = torch.where(keep > 0, keep, count)
    order = losses.where(candidates, torch.inf).sort(stable=True).indices
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return (place < keep) & candidates
