"""DivideMix (Li et al., ICLR 2020): two networks divide the samples; those with large losses lose their labels.

Warm-up: cross-entropy for both networks; with `penalty`, minus the entropy of the predictions. Then, before each epoch,
a mixture of two normal distributions is fitted to each network's losses, and w_i is the probability that sample i
belongs to the one with the small losses. Network a works with w of its peer b: samples with w_i > `threshold` keep
their labels, the others lose them. Every image has two views. In a step, without gradients,

    labelled     q = sharpen(w y + (1 - w) mean of p_a over the views)
    unlabelled   q = sharpen(mean of p_a and p_b over the views)          sharpen(q) = q^(1/T) / sum

All views are mixed with random partners, keeping a share of at least one half, and

    loss_a = CE(p_a, q) on labelled + ramp weight mean (p_a - q)^2 on unlabelled + sum_k (1/K) log((1/K) / mean p_a,k)

Differences from the authors' code: both networks are trained in the same steps, not one after the other; targets are
predicted in evaluation mode; with `unlabelled_weight` 0, unlabelled images are only partners, as in their code for
Clothing1M and WebVision.

A label is flagged if the mean of both w is below one half.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ..data.augment.policy import Policy
from ..data.batch import Batch
from ..data.parts import Part
from ..errors import ConfigError
from ..sample_table import SampleTable
from .method import BatchLayout, Cost, Forward, MethodSettings, Readout, Setup, StepOutput, TableCost, Trainer
from .mixture import scaled, small_component
from .pair import PairMethod, both

TABLE = "division"
_FORMAT = 1
_TIE = 1e-3  # weight of the loss in the score
_STREAM = 5  # of random numbers, and the next one for the second network; see `GlobalBatch.draws`


@dataclass(frozen=True)
class DivideMixSettings(MethodSettings):
    """DivideMix."""

    name: Literal["dividemix"] = "dividemix"  # two networks divide samples by their losses, and mix them
    warmup: int | None = None  # epochs of cross-entropy; published: 10, CIFAR-100 30, large data 1; null: a tenth
    penalty: bool = False  # confidence penalty in the warm-up; published: for asymmetric noise and Clothing1M
    threshold: float = 0.5  # of the probability of a small loss; published: 0.5, 0.6 at 90% noise
    unlabelled_weight: float = 25.0  # published: 0 to 50 for CIFAR-10, 25 to 150 for CIFAR-100; 0 for real label noise
    ramp: float = 16.0  # epochs after the warm-up over which that weight rises from 0
    temperature: float = 0.5  # of sharpening
    mixup_alpha: float = 4.0  # published: 4, 0.5 for Clothing1M and WebVision
    history: int = 1  # epochs whose losses are averaged for the division; published: 1, 5 at 90% noise

    def __post_init__(self) -> None:
        if self.warmup is not None and self.warmup < 1:
            raise ConfigError(f"method.warmup = {self.warmup}: must be at least 1")
        if not 0 < self.threshold < 1:
            raise ConfigError(f"method.threshold = {self.threshold}: must be more than 0 and less than 1")
        if not 0 <= self.unlabelled_weight < math.inf:
            raise ConfigError(f"method.unlabelled_weight = {self.unlabelled_weight}: must be finite and at least 0")
        for key in ("ramp", "temperature", "mixup_alpha"):
            if not 0 < getattr(self, key) < math.inf:
                raise ConfigError(f"method.{key} = {getattr(self, key)}: must be finite and more than 0")
        if not 1 <= self.history <= 100:
            raise ConfigError(f"method.history = {self.history}: must be from 1 to 100")


class DivisionTable(SampleTable):
    """Row i: the latest losses of both networks, their probabilities of a small loss, and the predicted class."""

    sent = ("clean",)

    losses: Tensor  # (rows, history, 2) float32, scaled to [0, 1], the latest first; NaN where there is none
    clean: Tensor  # (rows, 2) float32: w of the first and of the second network; NaN before the first division
    predicted: Tensor  # (rows,) int32
    divided: Tensor  # (rows,) int32: the epoch of the sample's latest division; -1: none

    def __init__(self, setup: Setup, history: int, *, first: int, stride: int) -> None:
        super().__init__(setup.samples, setup.classes, first=first, stride=stride)
        device = setup.device
        self.register_buffer("losses", torch.full((len(self), history, 2), torch.nan, device=device))
        self.register_buffer("clean", torch.full((len(self), 2), torch.nan, device=device))
        self.register_buffer("predicted", torch.zeros(len(self), dtype=torch.int32, device=device))
        self.register_buffer("divided", torch.full((len(self),), -1, dtype=torch.int32, device=device))
        self.register_meta(_FORMAT, device=device)


class Role(NamedTuple):
    """What a part of a batch is for."""

    network: int  # 0 or 1
    labelled: bool


class DivideMix(PairMethod):
    """Two networks that divide the samples for each other."""

    Settings = DivideMixSettings
    settings: DivideMixSettings
    _roles: tuple[Role, ...] = ()  # of the parts of a batch; empty during the warm-up
    _epoch, _steps = 0, 1  # of the current epoch

    def views(self) -> tuple[Policy | None, ...]:
        """Two weak views."""
        return (None, None)

    def full_batch_setting(self) -> str:
        """Partners are drawn from the full batch."""
        return "name"

    def batch_layout(self, batch: int) -> BatchLayout:
        """After the warm-up, each network gets `batch` samples, half of them labelled."""
        half = max(1, batch // 2)
        return BatchLayout(half, max(batch, 4 * half))

    def cost(self, samples: int, classes: int) -> Cost:  # noqa: ARG002
        """Per labelled sample and network: 6 views without gradients, 4 with; 2 with if `unlabelled_weight` is 0."""
        row = 8 * self.settings.history + 8 + 4 + 4
        passes = 2 * (6 + (4 if self.settings.unlabelled_weight else 2))
        return Cost(passes, (TableCost(TABLE, "dense", row, 8, 0, 8),))

    def make_tables(self, setup: Setup, *, first: int, stride: int) -> dict[str, SampleTable]:
        """Losses and their division."""
        return {TABLE: DivisionTable(setup, self.settings.history, first=first, stride=stride)}

    @property
    def _warmup(self) -> int:
        return max(1, self.setup.epochs // 10) if self.settings.warmup is None else self.settings.warmup

    # -- between epochs ------------------------------------------------------------------------------------------------

    def between_epochs(self, epoch: int, trainer: Trainer) -> None:
        """Divide the samples of the epoch by the losses of each network."""
        super().between_epochs(epoch, trainer)
        if epoch < self._warmup:
            return
        found = trainer.predictions(_losses_and_class, predict=_both_networks, samples=trainer.drawn(epoch))  # (N, 3)
        table, shared = self._table, self.shared[TABLE]
        rows = table.samples_of(slice(None))
        evaluated = torch.isfinite(found[rows, 0])
        table.predicted[evaluated] = found[rows, 2][evaluated].to(torch.int32)
        table.divided[evaluated] = epoch
        for network in range(2):
            losses = torch.from_numpy(scaled(found[:, network].double().cpu().numpy())).to(found)
            older = table.losses[evaluated, :-1, network]
            table.losses[evaluated, :, network] = torch.cat([losses[rows][evaluated][:, None], older], 1)
            mean = shared.gather(table.losses[:, :, network].nanmean(1)).double().cpu().numpy()
            mean[~torch.isfinite(found[:, 0]).cpu().numpy()] = np.nan  # not part of this division
            clean = torch.from_numpy(small_component(mean)).to(found)
            table.clean[evaluated, network] = clean[rows][evaluated]
        self._divided.fill_(epoch)

    def start(self, setup: Setup) -> None:
        """No division yet."""
        super().start(setup)
        if self._warmup >= setup.epochs > 1:
            raise ConfigError(f"method.warmup = {self._warmup}: must be less than train.epochs = {setup.epochs}")
        self._divided = torch.full((1,), -1, dtype=torch.int64)  # the epoch of the latest one

    def fingerprint(self) -> dict[str, Any]:
        """The length of the warm-up, which depends on `train.epochs` unless it is set."""
        return {"warmup": self._warmup}

    def begin_epoch(self, epoch: int) -> None:
        """Store the epoch, for the ramp."""
        self._epoch = epoch

    def parts(self, epoch: int) -> tuple[Part, ...]:
        """All samples in the warm-up; then for each network its labelled and its unlabelled ones.

        The network with more labelled samples comes first and determines the length of the epoch. If a network has no
        labelled samples at all, the epoch is one more of warm-up.
        """
        self._roles, batch = (), self.setup.batch
        self._steps = max(1, -(-self.setup.samples // batch))
        if epoch < self._warmup:
            return (Part(),)
        clean = self._clean()  # (N, 2)
        known = self.shared[TABLE].gather(self._table.divided).cpu().numpy() == int(self._divided)  # in this epoch
        known &= np.isfinite(clean).all(axis=1)
        labelled = [np.flatnonzero(known & (clean[:, 1 - network] > self.settings.threshold)) for network in range(2)]
        if not all(len(samples) for samples in labelled):
            return (Part(np.flatnonzero(known)) if known.any() else Part(),)
        half, parts, roles = max(1, batch // 2), [], []
        for network in sorted(range(2), key=lambda network: -len(labelled[network])):
            rest = np.setdiff1d(np.flatnonzero(known), labelled[network], assume_unique=True)
            parts += [Part(labelled[network], half), Part(rest, half)]
            roles += [Role(network, True), Role(network, False)]
        self._roles = tuple(roles)
        self._steps = -(-len(parts[0].samples) // half)  # type: ignore[arg-type]
        return tuple(parts)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def step(self, forward: Forward, batch: Batch) -> StepOutput:
        """A step of the warm-up, or of both networks on their own parts of the batch."""
        clean = self.shared[TABLE].rows(batch.index)[0]  # (B, 2)
        self.shared[TABLE].skip(len(batch))
        if not self._roles:
            return self._warm_up_step(forward, batch)
        assert batch.part is not None
        views = torch.stack([batch.images, *batch.other_views])  # (2, B, C, H, W)
        roles = batch.part.cpu()
        network_of = torch.tensor([role.network for role in self._roles])[roles].to(batch.part.device)
        labelled = torch.tensor([role.labelled for role in self._roles])[roles].to(batch.part.device)
        probabilities, logits, finite = self._guess(forward, views, network_of, labelled)
        targets = self._targets(probabilities, batch.labels, clean, network_of, labelled)
        counts = (batch.weight > 0) & finite
        everything = _Everything(
            torch.stack([self.batch.gather(view.contiguous()) for view in views]),
            self.batch.gather(targets),
            self.batch.gather(counts.float()),
            torch.tensor([role.network for role in self._roles], device=batch.part.device)[
                self.batch.gather(batch.part)
            ],
        )
        halves = []
        for network in range(2):
            own = (network_of == network) & (labelled if not self.settings.unlabelled_weight else True)
            halves.append(self._mixed(network, own.nonzero()[:, 0], labelled, everything))
        output = forward(halves[0].images, halves[1].images).float()
        losses = []
        for half, mixed in zip(halves, output.split([len(half.images) for half in halves]), strict=True):
            losses.append(self._loss(mixed, half))
        return StepOutput(self.scaled_to_batch(torch.stack(losses).sum(), batch.weight), logits, finite)

    def _warm_up_step(self, forward: Forward, batch: Batch) -> StepOutput:
        logits = both(forward(batch.images)).float()
        finite = torch.isfinite(logits).all(2).all(0)
        safe = logits.where(finite[None, :, None], 0)
        losses = torch.stack([F.cross_entropy(each, batch.labels, reduction="none") for each in safe])
        if self.settings.penalty:
            log_p = safe.log_softmax(2)
            losses = losses + (log_p.exp() * log_p).sum(2)
        return StepOutput((losses.sum(0) * batch.weight.where(finite, 0)).sum(), safe.mean(0), finite)

    @torch.no_grad()
    def _guess(
        self, forward: Forward, views: Tensor, network_of: Tensor, labelled: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Mean probabilities (B, K) over views, and for unlabelled samples over networks.

        Also returns each sample's logits by its own network on the first view, and which samples have finite logits.
        """
        needed = [(network_of == network) | ~labelled for network in range(2)]  # its own, and all unlabelled
        images = [views[:, mask].flatten(0, 1) for mask in needed]
        self.network.eval()
        output = forward(*images).float()
        self.network.train()
        parts = output.split([len(each) for each in images])
        total = output.new_zeros(views.shape[1], output.shape[1])
        logits, finite = torch.zeros_like(total), torch.ones_like(labelled)
        for network, (mask, part) in enumerate(zip(needed, parts, strict=True)):
            by_view = part.unflatten(0, (2, -1))  # (2, b, K)
            total[mask] += by_view.softmax(2).mean(0)
            finite[mask] &= torch.isfinite(by_view).all(2).all(0)
            own = mask & (network_of == network)
            logits[own] = by_view[0][own[mask]]
        mean = total / torch.where(labelled, 1, 2)[:, None]
        return mean.where(finite[:, None], 1 / total.shape[1]), logits.where(finite[:, None], 0), finite

    def _targets(self, guessed: Tensor, labels: Tensor, clean: Tensor, network_of: Tensor, labelled: Tensor) -> Tensor:
        """Sharpened targets (B, K). A label is weighted with w of the peer."""
        weight = clean.gather(1, 1 - network_of[:, None]).nan_to_num()  # (B, 1)
        refined = weight * F.one_hot(labels, guessed.shape[1]) + (1 - weight) * guessed
        target = torch.where(labelled[:, None], refined, guessed) ** (1 / self.settings.temperature)
        return target / target.sum(1, keepdim=True)

    def _mixed(self, network: int, mine: Tensor, labelled: Tensor, everything: _Everything) -> _Half:
        """The mixed images and targets of one network, which has samples `mine` of this rank's batch.

        Partners are drawn over all ranks. An item is a view of a sample: with n samples of this network in the global
        batch, item v n + i is view v of the i-th of them.
        """
        everyone, alpha = self.batch, self.settings.mixup_alpha
        draws = everyone.draws(_STREAM + network)
        share = draws.beta(alpha, alpha)
        share = max(share, 1 - share)
        columns = (everything.network_of == network).nonzero()[:, 0]  # (n,): positions in the global batch
        partner = torch.from_numpy(draws.permutation(2 * len(columns))).to(columns.device)
        here = mine + everyone.mine.start
        place = torch.searchsorted(columns, here)  # i of each sample
        images, targets, weights = [], [], []
        for view in range(2):
            item = partner[view * len(columns) + place]
            column, other_view = columns[item % len(columns)], item // len(columns)
            images.append(share * everything.views[view, here] + (1 - share) * everything.views[other_view, column])
            targets.append(share * everything.targets[here] + (1 - share) * everything.targets[column])
            weights.append(everything.counts[here] * everything.counts[column])
        return _Half(torch.cat(images), torch.cat(targets), torch.cat(weights), labelled[mine].repeat(2))

    def _loss(self, logits: Tensor, half: _Half) -> Tensor:
        """This rank's share of the loss of one network, a mean over the global batch. Collective."""
        settings, everyone = self.settings, self.batch
        finite = torch.isfinite(logits).all(1)
        weight = half.weight.where(finite, 0)
        safe = logits.where(finite[:, None], 0)
        log_p, p = safe.log_softmax(1), safe.softmax(1)
        on_labelled, on_unlabelled = weight * half.labelled, weight * ~half.labelled
        sizes = everyone.sum(torch.stack([on_labelled.sum(), on_unlabelled.sum()])).clamp_min(1e-12)
        supervised = -(half.targets * log_p).sum(1)
        squares = (p - half.targets).square().mean(1)
        ramped = settings.unlabelled_weight * min(max(self._elapsed() / settings.ramp, 0.0), 1.0)
        loss = (supervised * on_labelled).sum() / sizes[0] + ramped * (squares * on_unlabelled).sum() / sizes[1]
        prior = (p * weight[:, None]).sum(0) / sizes.sum()
        usable = sizes.sum() > 0.5  # otherwise, no item of the global batch can be used
        return loss + everyone.loss_of_sum(prior, _distance_from_uniform) * usable

    def _elapsed(self) -> float:
        """Epochs since the warm-up, in fractions."""
        return self._epoch - self._warmup + self.batch.step_of_epoch / self._steps

    # -- results -------------------------------------------------------------------------------------------------------

    @property
    def _table(self) -> DivisionTable:
        table = self.shared[TABLE].table
        assert isinstance(table, DivisionTable)
        return table

    def _clean(self) -> NDArray[np.float32]:
        """w of both networks, (N, 2). Collective."""
        columns = [self.shared[TABLE].gather(self._table.clean[:, network].contiguous()) for network in range(2)]
        return torch.stack(columns, dim=1).cpu().numpy()

    def state_dict(self) -> dict[str, Tensor]:
        """The epoch of the latest division."""
        return super().state_dict() | {"divided": self._divided}

    def readout(self, labels: Tensor) -> Readout | None:
        """The latest division; None during the warm-up."""
        if int(self._divided) < 0:
            return None
        shared, table = self.shared[TABLE], self._table
        clean = torch.from_numpy(self._clean()).mean(1)
        predicted = shared.gather(table.predicted).cpu().long()
        loss = shared.gather(table.losses[:, 0].mean(1)).cpu()  # in [0, 1]: orders the many samples with the same w
        visited = torch.isfinite(clean)
        flags = visited & (clean < 0.5)
        proposed = torch.where(flags, predicted, labels.cpu())
        scores = ((1 - clean) * (1 - _TIE) + _TIE * loss).where(visited, -torch.inf)
        return Readout(scores.numpy(), flags.numpy(), proposed.numpy(), visited.numpy())


class _Everything(NamedTuple):
    """What partners are taken from: the batch of all ranks."""

    views: Tensor  # (2, total, C, H, W)
    targets: Tensor  # (total, K)
    counts: Tensor  # (total,): 1 for samples that can be used
    network_of: Tensor  # (total,)


class _Half(NamedTuple):
    """The mixed items of one network on this rank."""

    images: Tensor  # (items, C, H, W)
    targets: Tensor  # (items, K)
    weight: Tensor  # (items,)
    labelled: Tensor  # (items,) bool


def _both_networks(forward: Forward, images: Tensor) -> Tensor:
    """Logits of both networks, (B, 2, K)."""
    return both(forward(images)).movedim(0, 1)


def _losses_and_class(logits: Tensor, labels: Tensor) -> Tensor:
    """The losses of both networks, and the class that they predict together, (B, 3), from logits (B, 2, K)."""
    losses = [F.cross_entropy(logits[:, network], labels, reduction="none") for network in range(2)]
    return torch.stack([*losses, logits.sum(1).argmax(1).float()], dim=1)


def _distance_from_uniform(mean: Tensor) -> Tensor:
    """sum_k (1/K) log((1/K) / mean_k)."""
    return -(mean.clamp_min(1e-12) * len(mean)).log().mean()
