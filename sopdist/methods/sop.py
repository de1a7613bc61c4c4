"""SOP and SOP+: the loss of `sopdist.noise`, with rows of the noise table sent one step ahead.

SOP+ adds two terms: agreement with a second, strongly augmented view (`consistency`), and balance of the classes over
the global batch (`balance`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..data.augment.policy import Policy
from ..data.batch import Batch
from ..errors import ConfigError
from ..noise import SOP
from ..noise.kernels.facts import FACT_WIRE_BYTES
from ..noise.rates import Paper, Rates, default_onset, forecast, make_rates
from ..noise.rows import DEFAULT_SLOTS, Layout, choose_layout, row_bytes, row_wire_bytes
from ..sample_table import ExchangeStats, SampleTable
from .global_batch import GlobalBatch
from .method import Cost, Forward, Method, MethodSettings, Outlook, Readout, Setup, StepOutput, TableCost
from .mixup import Pairs, draw_pairs, mix, mixed_losses

_WAITED = (
    "The run was plain cross-entropy, and flags are provisional. If you expect wrong labels, train longer, with less "
    "augmentation or with a larger network"
)
_DOUBTED = "Flags are provisional, and nothing is proposed: review suspects.csv before you change a label"
_RATES = ("visits", "alpha_u", "alpha_v", "lr_u", "lr_v")


@dataclass(frozen=True)
class SOPSettings(MethodSettings):
    """Sparse Over-Parameterization; with `consistency` or `balance` SOP+."""

    name: Literal["sop"] = "sop"  # Sparse Over-Parameterization
    consistency: float = 0.0  # SOP+: weight of the agreement of two views; > 0 doubles the cost of the network
    balance: float = 0.0  # SOP+: weight of the balance between the classes
    mixup: float = 0.0  # SOP+: weight of the loss on mixed pairs of samples, with corrected labels, from the onset on
    mixup_alpha: float = 4.0  # mixup: both parameters of the beta distribution of the shares; larger mixes more evenly
    variant: Literal["flow", "paper", "official"] = "flow"  # how a visit moves u and v
    onset: Literal["auto", "never", "always"] | int | None = None  # when it acts; null: auto for flow, else always
    target: float | None = None  # flow: weight of the pull towards what the table says; null: 0.5, 0 for onset always
    visits: float | None = None  # flow: visits of steady disagreement after which a label is flagged; null: 4
    alpha_u: float | None = None  # paper: step of u in units of the learning rate; null: 10
    alpha_v: float | None = None  # paper: step of v in units of the learning rate; null: 10
    lr_u: float | None = None  # official: step of u; null: 1
    lr_v: float | None = None  # official: step of v; null: 10
    lr_batch: int | None = None  # official: the batch size for which the steps were chosen; null: 128
    eps: float | None = None  # lower bound at which predictions are clipped; null: 1e-4, or 0.1 / classes if less
    layout: Literal["auto", "dense", "slots"] = "auto"  # of the table; auto: dense up to 256 MiB, else slots
    slots: int = DEFAULT_SLOTS  # entries that a row holds in the layout slots
    ahead: bool = True  # prefetch the rows of the next step during the current one; set to false only for measurements

    def __post_init__(self) -> None:
        for key in ("consistency", "balance", "mixup"):
            if not 0 <= getattr(self, key) < math.inf:
                raise ConfigError(f"method.{key} = {getattr(self, key)}: must be finite and at least 0")
        if not 0 < self.mixup_alpha < math.inf:
            raise ConfigError(f"method.mixup_alpha = {self.mixup_alpha}: must be finite and more than 0")

    def rates(self, lr: float) -> Rates:
        """The rates of u and v; the variant `paper` multiplies its own by `lr`."""
        given = {key: getattr(self, key) for key in _RATES} | {"batch_size": self.lr_batch}
        given["tau"] = lr if self.variant == "paper" else None
        try:
            return make_rates(self.variant, {key: value for key, value in given.items() if value is not None})
        except ValueError as error:
            raise ConfigError(f"method: {error}") from None


class SOPMethod(Method):
    """SOP, and with `consistency` or `balance` SOP+."""

    Settings = SOPSettings
    resumable_changes: ClassVar[Mapping[str, str]] = {
        "variant": "the noise table keeps its rows and updates them with the new rule"
    }

    dropped_entries_advice = "method.slots=... keeps more, method.layout=dense keeps all"

    settings: SOPSettings
    sop: SOP

    def full_batch_setting(self) -> str:
        """The balance term compares the mean prediction of the full batch, and partners are drawn from it."""
        return "balance" if self.settings.balance else "mixup" if self.settings.mixup else ""

    def views(self) -> tuple[Policy | None, ...]:
        """The consistency term compares with a strongly augmented view."""
        return (None, Policy()) if self.settings.consistency > 0 else (None,)

    def cost(self, samples: int, classes: int) -> Cost:
        """One table; one more forward pass for a second view, and one for mixed images."""
        layout, slots = self._layout(samples, classes), min(self.settings.slots, classes)
        table = TableCost(
            "noise",
            layout,
            row_bytes=row_bytes(layout, classes, slots),
            sent_bytes=row_wire_bytes(layout, classes, slots),
            returned_bytes=FACT_WIRE_BYTES,
            dense_bytes=2 * row_wire_bytes("dense", classes),
        )
        return Cost(len(self.views()) + (self.settings.mixup > 0), (table,))

    def _layout(self, samples: int, classes: int) -> Layout:
        layout = self.settings.layout
        return choose_layout(samples, classes, self.settings.slots) if layout == "auto" else layout

    def outlook(self, visits: float, lr: float) -> Outlook | None:
        """After how many visits the table can act; None if `onset` is never."""
        settings = self.settings
        onset = default_onset(settings.variant) if settings.onset is None else settings.onset
        if onset == "never":
            return None
        found = forecast(settings.rates(lr), onset, visits)
        return Outlook(None if math.isinf(found.visits) else found.visits, visits, str(found))

    def describe(self) -> str:
        """Includes the layout of the table, which `auto` leaves open."""
        return f"{self.name} ({self.sop.table.layout} table)"

    def start(self, setup: Setup) -> None:
        """Create the noise table, sharded across the ranks of the group."""
        settings = self.settings
        self._batch = GlobalBatch(setup)
        try:
            self.sop = SOP(
                setup.samples,
                setup.classes,
                variant=settings.variant,
                **{key: getattr(settings, key) for key in _RATES},
                batch_size=settings.lr_batch,
                onset=settings.onset,
                target=settings.target,
                layout=settings.layout,
                slots=settings.slots,
                seed=setup.seed,
                eps=settings.eps,
                consistency=settings.consistency,
                balance=settings.balance,
                reduction="sum",
                validate=False,  # the stream has checked labels and indices, and checking blocks on a GPU
                device=setup.device,
                process_group=setup.group,
            )
        except ValueError as error:
            raise ConfigError(f"method: {error}") from None
        self.sop.keep_corrected = settings.mixup > 0

    def prefetch(self, batch: NDArray[np.integer[Any]]) -> None:
        """Start sending the rows of the noise table that this batch needs."""
        parts = self._batch.announce(batch)
        if self._batch.ranks > 1 and self.settings.ahead:
            self.sop.prefetch(parts)

    def set_lr(self, lr: float) -> None:
        """The variant `paper` moves u and v in proportion to the learning rate."""
        if isinstance(self.sop.rates, Paper):
            self.sop.tau = lr

    def step(self, forward: Forward, batch: Batch) -> StepOutput:
        """All views go through the network together. Facts for the noise table are sent during the backward pass."""
        views, pairs = [batch.images, *batch.other_views], None
        if self.settings.mixup and self.sop.onset is not None:
            pairs = draw_pairs(self._batch, self.settings.mixup_alpha)
            views.append(mix(batch.images, pairs, self._batch.gather(batch.images.contiguous())))
        logits, *others = forward(torch.cat(views) if len(views) > 1 else batch.images).tensor_split(len(views))
        logits2 = others[0] if batch.other_views else None
        loss: Tensor = self.sop(logits, batch.labels, batch.index, logits2=logits2, weight=batch.weight)
        plain = (logits, *others) if pairs is None else (logits, *others[:-1])
        finite = torch.stack([torch.isfinite(view).all(dim=1) for view in plain]).all(dim=0)
        if pairs is not None:
            weight = batch.weight.where(finite, 0)
            mixed_finite = torch.isfinite(others[-1]).all(dim=1)
            loss = loss + self.settings.mixup * self._mixed_loss(others[-1], weight, mixed_finite, pairs)
            finite = finite & mixed_finite
        return StepOutput(loss, logits, finite)

    def _mixed_loss(self, logits: Tensor, weight: Tensor, finite: Tensor, pairs: Pairs) -> Tensor:
        """Sum over the mixed images whose logits, and those of both samples, are finite. Collective."""
        assert self.sop.corrected is not None
        targets = self.sop.corrected
        weights = self._batch.gather(weight)[pairs.partner] * weight.where(finite, 0)
        safe = logits.where((weights > 0)[:, None], 0)
        return (mixed_losses(safe, targets, pairs, self._batch.gather(targets)) * weights).sum()

    def flush(self) -> None:
        """Update the rows of the noise table that this rank owns."""
        self.sop.flush()
        self._batch.finish()

    def discard_prefetched(self) -> None:
        """Wait for rows in flight, and drop them."""
        self._batch.discard()
        if self.sop.exchange is not None:
            self.sop.exchange.discard_prefetched()

    def tables(self) -> dict[str, SampleTable]:
        """The noise table."""
        return {"noise": self.sop.table}

    def state_dict(self) -> dict[str, Tensor]:
        """What the decision about the onset depends on; with mixup, the position in its random numbers."""
        return {"onset": self.sop.onset_state()} | ({"steps": self._batch.counters[:1]} if self.settings.mixup else {})

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore it. Checkpoints of earlier versions have no onset: their table always acted."""
        if "onset" in state:
            self.sop.load_onset_state(state["onset"])
        if "steps" in state:
            self._batch.counters[:1].copy_(state["steps"])

    def fingerprint(self) -> dict[str, Any]:
        """The update rule. The layout may change: tables are converted."""
        return {"variant": self.settings.variant}

    def readout(self, labels: Tensor) -> Readout:
        """Scores, flags and proposals of the noise table."""
        known = labels.clamp_min(0)  # a sample without a label is never visited
        sop = self.sop
        found = sop.judge(known)
        columns = sop.noise_scores(), found.flags, found.proposed(known), sop.visited()
        scores, flags, proposed, visited = (column.cpu().numpy() for column in columns)
        active = int(sop.active().sum())
        evictions, evicted = sop.evictions()
        metrics = {"active_rows": active, "evictions": evictions, "largest_evicted": evicted, **self.status()}
        return Readout(scores, flags, proposed, visited, metrics, found.rate, found.interval, tuple(found.doubts))

    def status(self) -> dict[str, float]:
        """After how many epochs the table began to act or, before that, the value that decides on the onset."""
        if self.sop.onset is not None:
            return {"onset": self.sop.onset}
        return {} if self.sop.contradicted_fit is None else {"contradicted_fit": self.sop.contradicted_fit}

    def warnings(self, readout: Readout) -> tuple[str, ...]:
        """Each doubt, with advice."""
        if self.sop.onset is None and self.settings.onset == "never":
            return ()
        advice = _WAITED if self.sop.onset is None else _DOUBTED
        return tuple(f"{doubt}. {advice}" for doubt in readout.doubts)

    def exchange_stats(self) -> ExchangeStats:
        """The cost of sending rows and facts so far."""
        return ExchangeStats() if self.sop.exchange is None else self.sop.exchange.stats()
