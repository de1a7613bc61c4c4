"""ELR+ (Liu et al., NeurIPS 2020): two networks on mixed images, with ELR targets from each other's averaged weights.

For network a with peer b on a batch: targets t_a move towards the prediction of b's average on the unmixed images;
images, labels and targets of pairs are mixed with the same share; then

    loss_a = CE(p_a, mixed y) + ramp strength log(1 - <mixed t_a, p_a>),    p_a of the mixed image

Differences from the authors' code: both networks see the same batches and pairs; averages include batch statistics
and predict in evaluation mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.batch import Batch
from ..errors import ConfigError
from ..sample_table import SampleTable
from .averaged import average_towards
from .elr import Layout, TargetTable, check_strength_and_beta, read_targets, regularizer, target_cost, visit_targets
from .method import Cost, Forward, MethodSettings, Readout, Setup, StepOutput
from .mixup import draw_pairs, mix
from .pair import Pair, PairMethod, both


@dataclass(frozen=True)
class ELRPlusSettings(MethodSettings):
    """ELR with two networks, averaged weights and MixUp."""

    name: Literal["elr_plus"] = "elr_plus"  # ELR with two networks, averaged weights and MixUp
    strength: float = 3.0  # of the regulariser; published: 3 for CIFAR-10 (1 for asymmetric noise), 7 for CIFAR-100
    beta: float = 0.7  # how much of a target remains at a visit; published: 0.7 for CIFAR-10 (0.9 asymmetric), else 0.9
    mixup_alpha: float = 1.0  # of the beta distribution of shares; published: 1, 1.5 for WebVision; 0: no MixUp
    ema: float = 0.997  # decay of the averaged weights; published: 0.997, 0.9999 for Clothing1M
    ema_ramp: int = 40_000  # steps over which the decay rises to `ema`; 0: min(ema, 1 - 1 / (step + 1))
    strength_ramp: int = 0  # steps over which the strength rises; published: 0, 40000 for CIFAR-100
    sharpen_labels: bool = False  # multiply mixed labels by mixed targets; published: only for CIFAR-100
    layout: Layout = "float32"  # of the targets; float16 halves memory and traffic, off by 2^-12 / (1 - beta) at most

    def __post_init__(self) -> None:
        check_strength_and_beta(self.strength, self.beta)
        if not 0 <= self.mixup_alpha < math.inf:
            raise ConfigError(f"method.mixup_alpha = {self.mixup_alpha}: must be finite and at least 0")
        if not 0 <= self.ema < 1:
            raise ConfigError(f"method.ema = {self.ema}: must be at least 0 and less than 1")
        for key in ("ema_ramp", "strength_ramp"):
            if getattr(self, key) < 0:
                raise ConfigError(f"method.{key} = {getattr(self, key)}: must be at least 0")


class AveragedPair(Pair):
    """Two networks and an average of each, which has no gradients."""

    def __init__(self, first: nn.Module, second: nn.Module, make: Callable[[], nn.Module]) -> None:
        super().__init__(first, second)
        self.average = Pair(make(), make()).requires_grad_(False)
        for average, current in ((self.average.first, first), (self.average.second, second)):
            average.load_state_dict(current.state_dict())
        self.averages_predict = False

    def forward(self, images: Tensor, others: Tensor | None = None) -> Tensor:
        """Logits of the networks or, with `averages_predict`, of their averages."""
        if self.averages_predict:
            logits: Tensor = self.average(images, others)
            return logits
        return super().forward(images, others)

    def update(self, decay: float) -> None:
        """Move the averages towards the networks."""
        average_towards(self.average.first, self.first, decay)
        average_towards(self.average.second, self.second, decay)


class ELRPlus(PairMethod):
    """Two networks that give each other targets."""

    Settings = ELRPlusSettings
    settings: ELRPlusSettings
    network: AveragedPair

    def full_batch_setting(self) -> str:
        """Partners are drawn from the full batch."""
        return "name"

    def full_weights_setting(self) -> str:
        """The averages need unsharded weights."""
        return "name"

    def build_network(self, make: Callable[[], nn.Module]) -> nn.Module:
        """Two backbones and two averages."""
        self.network = AveragedPair(make(), make(), make)
        return self.network

    def cost(self, samples: int, classes: int) -> Cost:  # noqa: ARG002
        """Four forward passes, two of them without gradients; a row of two targets."""
        return Cost(4, (target_cost(classes, self.settings.layout, networks=2),))

    def make_tables(self, setup: Setup, *, first: int, stride: int) -> dict[str, SampleTable]:
        """The targets of both networks."""
        layout, device = self.settings.layout, setup.device
        options: dict[str, Any] = {"layout": layout, "device": device, "first": first, "stride": stride}
        return {"target": TargetTable(setup.samples, setup.classes, networks=2, **options)}

    def step(self, forward: Forward, batch: Batch) -> StepOutput:
        """Targets from the unmixed images, then the losses of both networks on the mixed ones."""
        settings, everyone = self.settings, self.batch
        unmixed = both(self._averages(forward, batch.images)).float()  # (2, B, K)
        readable = (batch.weight > 0) & torch.isfinite(unmixed).all(2).all(0)
        seen = unmixed.where(readable[None, :, None], 0).softmax(-1).flip(0).movedim(0, 1)  # (B, 2, K): from the peer
        targets = visit_targets(self.shared["target"], batch.index, seen, settings.beta, readable).movedim(1, 0)
        labels = F.one_hot(batch.labels, targets.shape[-1]).float()
        images, weight = batch.images, readable.float()
        if settings.mixup_alpha:
            pairs = draw_pairs(everyone, settings.mixup_alpha, one_share=True)
            images = mix(images, pairs, everyone.gather(images.contiguous()))
            labels = mix(labels, pairs, everyone.gather(labels))
            all_targets = everyone.gather(targets.movedim(0, 1).contiguous()).movedim(1, 0)
            targets = torch.stack([mix(mine, pairs, every) for mine, every in zip(targets, all_targets, strict=True)])
            weight = weight * everyone.gather(weight)[pairs.partner]
        logits = both(forward(images))
        finite = torch.isfinite(logits).all(2).all(0)
        weight = weight.where(finite, 0)
        safe = logits.where(finite[:, None], 0)
        wanted = labels.expand_as(targets)
        if settings.sharpen_labels:
            wanted = wanted * targets
            wanted = wanted / wanted.sum(-1, keepdim=True).clamp_min(1e-12)
        losses = -(wanted * safe.log_softmax(-1)).sum(-1)
        strength = settings.strength * ramp(everyone.step, settings.strength_ramp)
        losses = losses + strength * torch.stack([regularizer(*pair) for pair in zip(safe, targets, strict=True)])
        return StepOutput((losses.sum(0) * weight).sum(), unmixed.mean(0), readable & finite)

    @torch.no_grad()
    def _averages(self, forward: Forward, images: Tensor) -> Tensor:
        """Logits of both averages, in evaluation mode."""
        network = self.network
        network.averages_predict = True
        network.average.eval()
        logits = forward(images)
        network.average.train()
        network.averages_predict = False
        return logits

    def flush(self) -> None:
        """Update the targets and the averages."""
        step, settings = self.batch.step, self.settings
        decay = min(1 - 1 / (step + 1), settings.ema)
        if settings.ema_ramp:
            decay = ramp(step + 1, settings.ema_ramp) * settings.ema
        super().flush()
        self.network.update(decay)

    def readout(self, labels: Tensor) -> Readout:
        """Labels that are not the largest entry of the mean of both targets."""
        return read_targets(self.shared["target"], labels)


def ramp(step: int, length: int) -> float:
    """exp(-5 (1 - step / length)^2), which rises to 1; 1 if there is no ramp."""
    return math.exp(-5 * (1 - min(step, length) / length) ** 2) if length else 1.0
