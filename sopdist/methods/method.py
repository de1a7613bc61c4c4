"""The interface between the trainer and a method.

A method owns everything that differs between "train with cross-entropy" and "train with SOP": the views of an image it
wants, its network, the forward pass and loss of a step, its sample tables and other state, and what it says about the
labels. The trainer owns order, ranks, precision, optimizer, schedule, evaluation, checkpoints and records, and never
asks which method it is.

`Method` trains one network on one view and keeps no state; subclasses override what differs. `LossMethod` is for those
that are a loss per sample and nothing else. Rules for all of them:

- The samples, losses and tables of a step are the same on any number of ranks. Whatever needs the whole batch is taken
  over the global batch, and random draws come from counters of (seed, epoch, step, sample).
- Everything that a resumed run needs is in `tables()` or `state_dict()`.
- Every rank makes the same calls in the same order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from ..data.augment.policy import Policy
from ..data.batch import Batch
from ..sample_table import ExchangeStats, SampleTable

Forward = Callable[..., Tensor]  # the network on all ranks: logits in float32, from one or more batches of images


@dataclass(frozen=True)
class MethodSettings:
    """Base of every method's settings: the keys of `method:` in a config. A field's comment is its documentation."""

    name: str  # which method


@dataclass(frozen=True)
class Setup:
    """What a method needs to know to create its tables."""

    samples: int  # in the training split; every index is below
    classes: int
    seed: int
    device: torch.device
    group: dist.ProcessGroup | None  # for its tables alone; None: one rank

    @property
    def ranks(self) -> int:
        """How many ranks share the tables."""
        return 1 if self.group is None else dist.get_world_size(self.group)


class StepOutput(NamedTuple):
    """The result of a method on one (micro-)batch of this rank."""

    loss: Tensor  # scalar: the sum over the samples, each times its weight
    logits: Tensor  # (B, K): the predictions that accuracy is measured on
    finite: Tensor  # (B,) bool: samples whose outputs are finite; the others add nothing to loss and gradient


@dataclass(frozen=True)
class Readout:
    """What a method says about the labels of all samples, (N,) each."""

    scores: NDArray[np.float32]  # higher = more likely wrong; -inf for samples never visited
    flags: NDArray[np.bool_]  # labels that the method considers wrong
    proposed: NDArray[np.int64]  # the given label, or what it should be
    visited: NDArray[np.bool_]
    metrics: Mapping[str, float] = field(default_factory=dict)  # about its tables, for the log


@dataclass(frozen=True)
class TableCost:
    """Bytes of a sample table, per sample."""

    name: str
    layout: str
    row_bytes: int  # in memory and in a checkpoint
    sent_bytes: int  # of a row on its way to the rank that computes the sample
    returned_bytes: int  # of the facts or rows that its owner gets back
    dense_bytes: int  # what would travel both ways if full rows did


@dataclass(frozen=True)
class Cost:
    """What a method costs, known before a run."""

    forward_passes: int = 1  # of the network, per sample and step
    tables: tuple[TableCost, ...] = ()


@dataclass(frozen=True)
class Outlook:
    """Whether a method can work within the planned visits of each sample, as far as that is known before a run."""

    visits: float | None  # after which the method acts on a label; None: never
    planned: float
    text: str  # for the user: what will happen, and what to change if it cannot work

    @property
    def works(self) -> bool:
        """Whether it acts in time."""
        return self.visits is not None and self.visits <= self.planned


class Method(ABC):
    """One network, one view, no state."""

    Settings: ClassVar[type[MethodSettings]]
    # Settings that may be changed on resume with `--allow-change method.KEY`, and what that means.
    resumable_changes: ClassVar[Mapping[str, str]] = {}

    # How to keep entries of a table that a resumed run has less room for.
    dropped_entries_advice: ClassVar[str] = ""

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    @property
    def name(self) -> str:
        """As in `method.name`."""
        return str(self.settings.name)

    # -- before a run: nothing here needs data, ranks or a device ------------------------------------------------------

    def second_view(self) -> Policy | None:
        """The strong augmentation of a second view of every image; None: one view."""
        return None

    def full_batch_setting(self) -> str:
        """The setting that needs the whole batch of a rank at once, which rules out `train.accumulate` > 1; or ""."""
        return ""

    def build_network(self, make: Callable[[], nn.Module]) -> nn.Module:
        """The module that is trained and saved; `make` creates one backbone. Pairs and averages are its children."""
        return make()

    def predict(self, forward: Forward, images: Tensor) -> Tensor:
        """Logits (B, K) for evaluation."""
        return forward(images)

    def cost(self, samples: int, classes: int) -> Cost:
        """Bytes and forward passes, for `sopdist plan`."""
        return Cost()

    def outlook(self, visits: float, lr: float) -> Outlook | None:
        """What can be said before a run in which each sample is visited this often; None: nothing."""
        return None

    def describe(self) -> str:
        """A few words for the first line of the log."""
        return self.name

    # -- a run ---------------------------------------------------------------------------------------------------------

    def start(self, setup: Setup) -> None:
        """Create tables and other state. ValueError if the settings do not fit the data. Collective."""

    def begin_epoch(self, epoch: int) -> None:
        """Before the first step of an epoch, also of one that is resumed in the middle. Collective."""

    def prefetch(self, batch: NDArray[np.integer[Any]]) -> None:
        """The samples of the next step, over all ranks: start sending what they need."""

    def set_lr(self, lr: float) -> None:
        """The network's learning rate from now on."""

    @abstractmethod
    def step(self, forward: Forward, batch: Batch) -> StepOutput:
        """Forward pass and loss of (a micro-batch of) this rank's batch."""

    def flush(self) -> None:
        """The backward pass is over: finish what was sent during it."""

    def discard_prefetched(self) -> None:
        """The run stops: the batch that was prefetched will not come."""

    # -- state and results ---------------------------------------------------------------------------------------------

    def tables(self) -> dict[str, SampleTable]:
        """Per-sample state by name: sharded, saved and resharded with every checkpoint."""
        return {}

    def state_dict(self) -> dict[str, Tensor]:
        """Replicated state: identical on every rank."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state_dict` returned."""

    def fingerprint(self) -> dict[str, Any]:
        """Settings that must not change silently on resume."""
        return {}

    def readout(self, labels: Tensor) -> Readout | None:
        """What is known about the labels (N,), given as they are now; None: nothing. Collective."""
        return None

    def exchange_stats(self) -> ExchangeStats:
        """What sending rows has cost so far."""
        return ExchangeStats()


class LossMethod(Method):
    """A method that is a loss per sample: subclasses define `losses`."""

    @abstractmethod
    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of each sample, (B,), from finite logits (B, K) in float32 and labels (B,)."""

    def step(self, forward: Forward, batch: Batch) -> StepOutput:
        """The weighted sum over the samples whose logits are finite."""
        logits = forward(batch.images)
        finite = torch.isfinite(logits).all(dim=1)
        losses = self.losses(logits.float().where(finite[:, None], 0), batch.labels)
        return StepOutput((losses * batch.weight.where(finite, 0)).sum(), logits, finite)
