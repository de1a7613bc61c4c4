"""MixUp (Zhang et al., ICLR 2018): train on weighted means of two images and of their losses. Other methods use it too.

    x~ = share x_i + (1 - share) x_j          loss = share CE(p(x~), y_i) + (1 - share) CE(p(x~), y_j)

Partners and shares are drawn over the batch of all ranks. Two ranks, samples a b | c d with the partners 2 0 3 1:
rank 0 mixes a with c and b with a, rank 1 c with d and d with b. The images of other ranks are gathered.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..data.batch import Batch
from ..errors import ConfigError
from .global_batch import GlobalBatch
from .method import Forward, MethodSettings, StepOutput
from .table_method import TableMethod

_STREAM = 3  # of random numbers, see `GlobalBatch.draws`


class Pairs(NamedTuple):
    """What this rank mixes."""

    partner: Tensor  # (B,) int64: position in the global batch
    share: Tensor  # (B,) float32: of the sample itself; the rest is the partner's


def draw_pairs(batch: GlobalBatch, alpha: float, *, one_share: bool = False, at_least_half: bool = True) -> Pairs:
    """Partners and shares of this step. `one_share`: one for all samples; `at_least_half`: no share is below 1/2."""
    draws = batch.draws(_STREAM)
    share = np.repeat(draws.beta(alpha, alpha), batch.total) if one_share else draws.beta(alpha, alpha, batch.total)
    partner = draws.permutation(batch.total)
    if at_least_half:
        share = np.maximum(share, 1 - share)
    shares = torch.from_numpy(share[batch.mine].astype(np.float32))
    return Pairs(torch.from_numpy(partner[batch.mine]).to(batch.device), shares.to(batch.device))


def mix(values: Tensor, pairs: Pairs, everything: Tensor) -> Tensor:
    """Mixed images or targets (B, ...); `everything` has those of all ranks."""
    share = pairs.share.view(-1, *[1] * (values.dim() - 1))
    return share * values + (1 - share) * everything[pairs.partner]


def mixed_losses(logits: Tensor, targets: Tensor, pairs: Pairs, all_targets: Tensor) -> Tensor:
    """Cross-entropy of the logits (B, K) of mixed images with both samples' targets (B,), weighted by their shares."""
    own = F.cross_entropy(logits, targets, reduction="none")
    other = F.cross_entropy(logits, all_targets[pairs.partner], reduction="none")
    return pairs.share * own + (1 - pairs.share) * other


@dataclass(frozen=True)
class MixUpSettings(MethodSettings):
    """MixUp."""

    name: Literal["mixup"] = "mixup"  # cross-entropy on mixed pairs of images
    alpha: float = 1.0  # both parameters of the beta distribution of the share; larger, e.g. 8, resists more noise

    def __post_init__(self) -> None:
        if not 0 < self.alpha < math.inf:
            raise ConfigError(f"method.alpha = {self.alpha}: must be finite and more than 0")


class MixUp(TableMethod):
    """Cross-entropy on mixed pairs; one share per step."""

    Settings = MixUpSettings
    settings: MixUpSettings

    def full_batch_setting(self) -> str:
        """Partners are drawn from the full batch."""
        return "name"

    def step(self, forward: Forward, batch: Batch) -> StepOutput:
        """A mixed image counts only if both of its samples are readable and its logits are finite."""
        pairs = draw_pairs(self.batch, self.settings.alpha, one_share=True, at_least_half=False)
        logits = forward(mix(batch.images, pairs, self.batch.gather(batch.images.contiguous())))
        finite = torch.isfinite(logits).all(dim=1)
        weight = batch.weight * self.batch.gather(batch.weight)[pairs.partner]
        weight = weight.where(finite, 0)
        safe = logits.where(finite[:, None], 0)
        losses = mixed_losses(safe, batch.labels, pairs, self.batch.gather(batch.labels))
        return StepOutput((losses * weight).sum(), logits, finite)
