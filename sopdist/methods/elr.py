"""Early-learning regularisation, ELR (Liu et al., NeurIPS 2020): keep predictions near their own past average.

Each sample has a target t, a moving average of its predictions p. Each visit updates t, then computes the loss:

    t <- beta t + (1 - beta) p / sum(p)          loss = CE(p, y) + strength log(1 - <t, p>)

with p clipped to [1e-4, 1 - 1e-4], except in CE. The second term pulls predictions towards t, which was learned before
wrong labels were memorised. A label is flagged if it is not the largest entry of t.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.batch import Batch
from ..errors import ConfigError
from ..sample_table import SampleTable, SharedTable
from .method import Cost, Forward, MethodSettings, Readout, Setup, StepOutput, TableCost
from .table_method import TableMethod

CLIP = 1e-4
_FORMAT = 1
_DTYPES = {"float32": torch.float32, "float16": torch.float16}
Layout = Literal["float32", "float16"]


class TargetTable(SampleTable):
    """Row i: the target of sample i, for one network or for each of several, and how often it was visited.

    In the layout float16, an entry takes 2 bytes instead of 4. Each visit multiplies its error by beta and adds a
    rounding error of at most 2^-12, so no entry is ever off by more than 2^-12 / (1 - beta): 0.0008 for beta = 0.7,
    0.0025 for 0.9.
    """

    sent = ("target", "visits")

    target: Tensor  # (rows, networks, K)
    visits: Tensor  # (rows,) int32

    def __init__(
        self,
        num_samples: int,
        num_classes: int,
        *,
        networks: int = 1,
        layout: Layout = "float32",
        device: torch.device | str | None = None,
        first: int = 0,
        stride: int = 1,
    ) -> None:
        super().__init__(num_samples, num_classes, first=first, stride=stride)
        shape = (len(self), networks, num_classes)
        self.register_buffer("target", torch.zeros(shape, dtype=_DTYPES[layout], device=device))
        self.register_buffer("visits", torch.zeros(len(self), dtype=torch.int32, device=device))
        self.register_meta(_FORMAT, device=device)

    def write(self, rows: Tensor, facts: Sequence[Tensor]) -> None:
        """Replace the targets of rows that this rank owns, where the visit counts."""
        target, counts = facts
        self.target[rows[counts]] = target[counts]
        self.visits[rows[counts]] += 1


def visit_targets(shared: SharedTable, index: Tensor, seen: Tensor, beta: float, counts: Tensor) -> Tensor:
    """Move the targets of samples towards what was seen, (B, networks, K) probabilities; returns the new targets.

    `counts` (B,): the visits that count. The others leave their row as it is.
    """
    table = shared.table
    assert isinstance(table, TargetTable)
    target = shared.rows(index)[0].float()
    moved = (beta * target + (1 - beta) * seen.detach().float()).to(table.target.dtype)
    shared.give(index, [moved, counts], table.write)
    return moved.float().where(counts[:, None, None], target)


def read_targets(shared: SharedTable, labels: Tensor) -> Readout:
    """Flags labels that are not the largest entry of their target. Collective.

    The score is the largest entry of another class minus that of the label, from the mean over networks.
    """
    table = shared.table
    assert isinstance(table, TargetTable)
    shared.flush()
    mine = table.samples_of(slice(None))
    target, label = table.target.float().mean(1), labels[mine].clamp_min(0)[:, None]  # (rows, K), (rows, 1)
    own = target.gather(1, label)[:, 0]
    rival, best = target.scatter(1, label, -torch.inf).max(1)
    score, proposal, visits = (shared.gather(column) for column in (rival - own, best, table.visits))
    visited = visits > 0
    flags = visited & (score > 0)
    proposed = torch.where(flags, proposal, labels)
    scores = score.where(visited, -torch.inf).cpu().numpy().astype(np.float32)
    return Readout(scores, flags.cpu().numpy(), proposed.cpu().numpy(), visited.cpu().numpy())


def target_cost(classes: int, layout: Layout, networks: int = 1) -> TableCost:
    """The cost of a `TargetTable`: rows are sent both ways."""
    entries = networks * classes * _DTYPES[layout].itemsize
    full = networks * classes * 4 + 4
    return TableCost("target", layout, entries + 4, entries + 4, entries + 1, 2 * full)


def clipped(logits: Tensor) -> Tensor:
    """Probabilities, clipped as in the loss."""
    return logits.softmax(-1).clamp(CLIP, 1 - CLIP)


def regularizer(logits: Tensor, targets: Tensor) -> Tensor:
    """log(1 - <t, p>) of each sample, (B,), from logits and targets (B, K)."""
    inner = (targets * clipped(logits)).sum(-1)
    return torch.log1p(-inner.clamp_max(1 - 1e-6))


class ELR(nn.Module):
    """The loss for your own loop: `elr = ELR(samples, classes)`, then `elr(logits, labels, index)`, in one process."""

    def __init__(
        self,
        num_samples: int,
        num_classes: int,
        *,
        strength: float = 3.0,
        beta: float = 0.7,
        layout: Layout = "float32",
    ) -> None:
        super().__init__()
        self.table = TargetTable(num_samples, num_classes, layout=layout)
        self._shared = SharedTable(self.table, None)
        self.strength, self.beta = strength, beta

    @property
    def targets(self) -> Tensor:
        """The targets of all samples, (N, K)."""
        return self.table.target[:, 0]

    def forward(self, logits: Tensor, labels: Tensor, index: Tensor) -> Tensor:
        """The mean loss of a batch; updates the targets of its samples."""
        seen = clipped(logits.detach())
        seen = (seen / seen.sum(1, keepdim=True))[:, None]
        counts = torch.ones_like(index, dtype=torch.bool)
        targets = visit_targets(self._shared, index, seen, self.beta, counts)[:, 0]
        loss: Tensor = F.cross_entropy(logits, labels) + self.strength * regularizer(logits, targets).mean()
        return loss

    def readout(self, labels: Tensor) -> Readout:
        """Scores, flags and proposals for the labels (N,)."""
        return read_targets(self._shared, labels)


@dataclass(frozen=True)
class ELRSettings(MethodSettings):
    """Early-learning regularisation."""

    name: Literal["elr"] = "elr"  # early-learning regularisation
    strength: float = 3.0  # of the regulariser; published: 3 for CIFAR-10 (1 for asymmetric noise), 7 for CIFAR-100
    beta: float = 0.7  # how much of a target remains at a visit; published: 0.7 for CIFAR-10 (0.9 asymmetric), else 0.9
    layout: Layout = "float32"  # of the targets; float16 halves memory and traffic, off by 2^-12 / (1 - beta) at most

    def __post_init__(self) -> None:
        check_strength_and_beta(self.strength, self.beta)


def check_strength_and_beta(strength: float, beta: float) -> None:
    """ConfigError if they are out of range."""
    if not 0 <= strength < math.inf:
        raise ConfigError(f"method.strength = {strength}: must be finite and at least 0")
    if not 0 <= beta < 1:
        raise ConfigError(f"method.beta = {beta}: must be at least 0 and less than 1")


class ELRMethod(TableMethod):
    """Cross-entropy plus the regulariser."""

    Settings = ELRSettings
    settings: ELRSettings

    def cost(self, samples: int, classes: int) -> Cost:  # noqa: ARG002
        """A row of K entries per sample."""
        return Cost(1, (target_cost(classes, self.settings.layout),))

    def make_tables(self, setup: Setup, *, first: int, stride: int) -> dict[str, SampleTable]:
        """The targets."""
        layout, device = self.settings.layout, setup.device
        table = TargetTable(setup.samples, setup.classes, layout=layout, device=device, first=first, stride=stride)
        return {"target": table}

    def step(self, forward: Forward, batch: Batch) -> StepOutput:
        """The targets are updated first, then used."""
        logits = forward(batch.images)
        finite = torch.isfinite(logits).all(dim=1)
        safe = logits.float().where(finite[:, None], 0)
        seen = clipped(safe.detach())
        seen = (seen / seen.sum(1, keepdim=True))[:, None]
        weight = batch.weight.where(finite, 0)
        targets = visit_targets(self.shared["target"], batch.index, seen, self.settings.beta, weight > 0)[:, 0]
        losses = F.cross_entropy(safe, batch.labels, reduction="none")
        losses = losses + self.settings.strength * regularizer(safe, targets)
        return StepOutput((losses * weight).sum(), logits, finite)

    def readout(self, labels: Tensor) -> Readout:
        """Labels that are not the largest entry of their target."""
        return read_targets(self.shared["target"], labels)
