"""The interface between the trainer and a method.

A method owns everything that differs between "train with cross-entropy" and "train with SOP": the views of an image it
needs, its network, the forward pass and loss of a step, its sample tables and other state, and what it reports about
the labels. The trainer owns order, ranks, precision, optimizer, schedule, evaluation, checkpoints and logging, and does
not know which method it runs.

`Method` trains one network on one view and keeps no state; subclasses override what differs. `LossMethod` is for
methods that only define a loss per sample. Rules for all of them:

- The samples, losses and tables of a step are the same on any number of ranks. Anything that needs the full batch is
  computed over the global batch, and random draws come from counters of (seed, epoch, step, sample).
- Everything that a resumed run needs is in `tables()` or `state_dict()`.
- Every rank makes the same calls in the same order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from ..data.augment.policy import Policy
from ..data.batch import Batch
from ..data.parts import Part
from ..sample_table import ExchangeStats, SampleTable

Forward = Callable[..., Tensor]  # the network on all ranks: logits in float32, from one or more batches of images
Predict = Callable[[Forward, Tensor], Tensor]  # from images to the output that `PerSample` gets
PerSample = Callable[[Tensor, Tensor], Tensor]  # from that output (B, ...) and labels (B,) to values (B,) or (B, ...)


class Trainer(Protocol):
    """What a method may ask of the trainer between epochs. All calls are collective."""

    def predictions(
        self, per_sample: PerSample, *, predict: Predict | None = None, samples: NDArray[np.int64] | None = None
    ) -> Tensor:
        """Evaluate every training sample, or each of `samples` (ascending), once, as in evaluation.

        Returns the value of `per_sample` for each sample: (N,) or (N, ...) in float32, the same on every rank; NaN for
        samples that were not evaluated or have no readable image. `predict` replaces that of the method.
        """

    def drawn(self, epoch: int) -> NDArray[np.int64] | None:
        """The samples that `data.balanced_per_epoch` draws for this epoch, ascending; None: all."""

    def weights(self) -> dict[str, Tensor]:
        """A copy of all weights and buffers, on the CPU."""

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Load weights that `weights` returned."""

    def restart(self) -> None:
        """Continue with a fresh network and a fresh optimizer state."""


@dataclass(frozen=True)
class MethodSettings:
    """Base of every method's settings: the keys of `method:` in a config. A field's comment is its documentation."""

    name: str  # which method


@dataclass(frozen=True)
class Setup:
    """What a method needs to know to create its tables and other state."""

    samples: int  # in the training split; every index is less than this
    classes: int
    epochs: int
    batch: int  # samples per step over all ranks: train.batch
    labels: NDArray[np.integer[Any]]  # (samples,) as given; -1 where unknown
    seed: int
    device: torch.device
    group: dist.ProcessGroup | None  # used only by the method; None if there is one rank

    @property
    def ranks(self) -> int:
        """The number of ranks that share the tables."""
        return 1 if self.group is None else dist.get_world_size(self.group)


class BatchLayout(NamedTuple):
    """The columns of a global batch over the whole run."""

    leading: int  # the fewest that the first part ever has; determines the largest number of steps of an epoch
    widest: int  # the most that all parts together ever have


class StepOutput(NamedTuple):
    """The result of a method on one (micro-)batch of this rank."""

    loss: Tensor  # scalar: the sum over the samples, each times its weight
    logits: Tensor  # (B, K): the predictions that accuracy is measured on
    finite: Tensor  # (B,) bool: samples whose outputs are finite; the others add nothing to loss and gradient


@dataclass(frozen=True)
class Readout:
    """What a method reports about the labels of all samples, (N,) each."""

    scores: NDArray[np.float32]  # higher = more likely wrong; -inf for samples never visited
    flags: NDArray[np.bool_]  # labels that the method considers wrong
    proposed: NDArray[np.int64]  # the given label, or its proposed correction
    visited: NDArray[np.bool_]
    metrics: Mapping[str, float] = field(default_factory=dict)  # about its tables, for the log
    rate: float | None = None  # estimated fraction of wrong labels; None: the share of flags
    interval: tuple[float, float] | None = None  # lower and upper estimate of it
    doubts: tuple[str, ...] = ()  # why flags are provisional, in sentences for users; then nothing is proposed


@dataclass(frozen=True)
class TableCost:
    """Bytes of a sample table, per sample."""

    name: str
    layout: str
    row_bytes: int  # in memory and in a checkpoint
    sent_bytes: int  # of a row, sent to the rank that computes the sample
    returned_bytes: int  # of the facts or rows that are sent back to the owner
    dense_bytes: int  # if full rows were sent both ways


@dataclass(frozen=True)
class Cost:
    """The cost of a method, known before a run."""

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

    # Advice on how to keep table entries if a resumed run has less room for them.
    dropped_entries_advice: ClassVar[str] = ""

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    @property
    def name(self) -> str:
        """As in `method.name`."""
        return str(self.settings.name)

    # -- before a run: nothing here needs data, ranks or a device ------------------------------------------------------

    def views(self) -> tuple[Policy | None, ...]:
        """The views of every training image: weak (None), or strong as the policy says. At most four."""
        return (None,)

    def batch_layout(self, batch: int) -> BatchLayout:
        """The columns of a batch, for methods whose `parts` are not one part of `batch` (`train.batch`) columns."""
        return BatchLayout(batch, batch)

    def stages(self, epochs: int) -> tuple[int, ...]:
        """The lengths in epochs of the stages of a run: the learning-rate schedule restarts with each of them."""
        return (epochs,)

    def full_batch_setting(self) -> str:
        """The setting that needs the full batch of a rank at once, which rules out `train.accumulate` > 1; or ""."""
        return ""

    def full_weights_setting(self) -> str:
        """The setting that needs unsharded weights between steps, which rules out ZeRO-3; or ""."""
        return ""

    def build_network(self, make: Callable[[], nn.Module]) -> nn.Module:
        """The module that is trained and saved; `make` creates one backbone. Pairs and averages are its children.

        `Trainer.restart` calls it again, and uses only the weights.
        """
        return make()

    def backbone_weights(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Of all weights of `build_network`, those of the one backbone that an export writes, by its own names."""
        return weights

    def predict(self, forward: Forward, images: Tensor) -> Tensor:
        """Logits (B, K) for evaluation."""
        return forward(images)

    def cost(self, samples: int, classes: int) -> Cost:
        """Bytes and forward passes, for `sopdist plan`."""
        return Cost()

    def outlook(self, visits: float, lr: float) -> Outlook | None:
        """A forecast for a run in which each sample is visited this often; None if there is none."""
        return None

    def describe(self) -> str:
        """A few words for the first line of the log."""
        return self.name

    # -- a run ---------------------------------------------------------------------------------------------------------

    def start(self, setup: Setup) -> None:
        """Create tables and other state. ConfigError if the settings do not fit the data. Collective."""

    def between_epochs(self, epoch: int, trainer: Trainer) -> None:
        """Called before the first step of an epoch, but not when a run resumes in the middle of it. Collective.

        Schedules, mixture models, choices of samples: whatever the epoch needs belongs in `state_dict` or a table.
        """

    def begin_epoch(self, epoch: int) -> None:
        """Called before the first step of an epoch, after `between_epochs`, and also on a resume in its middle."""

    def parts(self, epoch: int) -> tuple[Part, ...]:
        """The samples of this epoch, from saved state only: also called after a resume. Collective.

        With several parts, every batch has samples of each of them; see `data/parts.py` and `Batch.part`.
        """
        return (Part(),)

    def lr_factor(self, epoch: int) -> float:
        """The factor by which the learning rate of this epoch is multiplied."""
        return 1.0

    def prefetch(self, batch: NDArray[np.integer[Any]]) -> None:
        """Start sending what the samples of the next step need; `batch` has those of all ranks."""

    def set_lr(self, lr: float) -> None:
        """Set the network's current learning rate."""

    @abstractmethod
    def step(self, forward: Forward, batch: Batch) -> StepOutput:
        """Forward pass and loss of (a micro-batch of) this rank's batch."""

    def flush(self) -> None:
        """Called after the backward pass: finish the exchange that was started during it."""

    def discard_prefetched(self) -> None:
        """Called when the run stops: the prefetched batch will not be used."""

    # -- state and results ---------------------------------------------------------------------------------------------

    def tables(self) -> dict[str, SampleTable]:
        """Per-sample state by name: sharded, saved and resharded with every checkpoint."""
        return {}

    def state_dict(self) -> dict[str, Tensor]:
        """Replicated state: identical on every rank."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned."""

    def fingerprint(self) -> dict[str, Any]:
        """Settings that must not change silently on resume."""
        return {}

    def readout(self, labels: Tensor) -> Readout | None:
        """What the method reports about the current labels (N,); None if nothing. Collective."""
        return None

    def status(self) -> Mapping[str, float]:
        """Values for every line of the log. Cheap, and not collective."""
        return {}

    def warnings(self, readout: Readout) -> tuple[str, ...]:
        """What a user should know at the end of a run, and what to do about it."""
        return readout.doubts

    def exchange_stats(self) -> ExchangeStats:
        """The cost of sending rows so far."""
        return ExchangeStats()


class LossMethod(Method):
    """A method that only defines a loss per sample: subclasses implement `losses`."""

    @abstractmethod
    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of each sample, (B,), from finite logits (B, K) in float32 and labels (B,)."""

    def step(self, forward: Forward, batch: Batch) -> StepOutput:
        """The weighted sum over the samples whose logits are finite."""
        logits = forward(batch.images)
        finite = torch.isfinite(logits).all(dim=1)
        losses = self.losses(logits.float().where(finite[:, None], 0), batch.labels)
        return StepOutput((losses * batch.weight.where(finite, 0)).sum(), logits, finite)
