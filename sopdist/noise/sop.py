"""The SOP loss: five lines in any PyTorch training loop.

    sop = SOP(num_samples=len(dataset), num_classes=14)
    for images, labels, index in loader:          # index: each sample's fixed index in [0, N)
        loss = sop(model(images), labels, index)  # u and v of these samples are updated in place
        loss.backward(); optimizer.step(); optimizer.zero_grad()
    sop.suspects(100)                             # the samples whose labels are most likely wrong

For a sample with label y, the loss adds a noise term s to the network's prediction p. Each sample learns its own s:

    s = u^2 at y, -v_k^2 at every other class k          loss = -log phi(p + s)_y,   phi clips at eps and normalises

s starts at about 1e-16 and grows only where the network keeps contradicting the label, visit after visit. A network
learns patterns that many samples share before it memorises single samples; by then, s has absorbed the wrong label.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from ..sample_table import Exchange, check_same_on_all_ranks
from ..sample_table.table import keep_dtype
from .checks import check_batch, check_prior, check_values, check_weight
from .evidence import weigh
from .fused import FusedLoss
from .kernels import DROPPED, Facts, Kernels, choose_kernels
from .kernels.facts import from_wire, to_wire
from .onset import Setting
from .plus import as_share_of_all, balance_term, consistency_term, weighted_prediction
from .rates import VOTES, Forecast, InactiveTableWarning, Paper, Step, default_onset, forecast, make_rates
from .readout import Readout
from .rows import DEFAULT_SLOTS, NoiseTable, RowBlock, corrected_labels
from .windows import Windows

# With a smaller eps, an initial v^2 could change p - v^2, and slots would no longer equal dense bit for bit.
SMALLEST_EPS = 1e-6
DEFAULT_TARGET = 0.5


class SOP(Readout, nn.Module):
    """The SOP and SOP+ loss with its noise table.

    Args:
        num_samples: N; every index is in [0, N).
        num_classes: K.
        variant: how a visit moves u and v. "flow" (default) is the exact solution of the paper's gradient flow over one
            visit, set by `visits` alone and independent of learning rate, batch size and world size. "paper" takes
            projected steps of size alpha * tau, "official" the steps of the authors' published code.
        visits: for "flow": visits of steady disagreement until a label is absorbed by the noise term (default 4).
        alpha_u, alpha_v, tau: for "paper" (default 10, 10, 0.02). Assign to `sop.tau` when the learning rate changes.
        lr_u, lr_v, batch_size: for "official" (default 1, 10, 128).
        onset: when the table starts to act. "auto": once the run shows that the network memorises labels; before that
            the loss is exactly cross-entropy, and the rows only count votes (see docs/noise.md). "always": from the
            first visit. "never", or after a number of epochs (visits of every sample). Default: "auto" for "flow",
            "always" for the other variants.
        target: weight of a term that pulls the prediction towards what the table says, once it acts: the label, or the
            class in whose favour it was flagged. Default: 0.5, or 0 for a table that acted from the first visit. For
            "flow". The term is left out if labels look clean at the onset.
        layout: "dense" stores v of all classes, "slots" only the entries that have changed; "auto" chooses by size.
        slots: maximum number of entries per row in the layout "slots".
        seed: seed of the table's initial values.
        eps: lower clipping bound of phi. Default: the authors' 1e-4, or 0.1/K if that is less (at 1e-4, a network with
            more than 10,000 classes would start with every class clipped, and no gradient).
        consistency, balance, prior: weights of the two terms of SOP+. `consistency` needs `logits2`, the second view;
            `prior` (K,) is the target of the mean prediction, uniform by default.
        epochs: the planned number of epochs, if known. Warns immediately if the table cannot act within them.
        reduction: "mean" over the samples that are not skipped, "sum", or "none" for the losses (B,), without SOP+.
        validate: check the values of labels, index and weight in every batch. On a GPU this synchronizes with the
            device; turn it off once you trust the loader. Samples out of range are then skipped and counted instead.
        device: device of the table.
        process_group: the ranks that train one network, each with a part of every batch. Pass a group of its own:
            `torch.distributed.new_group()`. The table is then sharded: row i is on rank i mod W only. The loss of a
            rank is scaled so that the mean over ranks, which DDP takes, is the loss of the global batch. Every rank
            must create SOP with the same arguments. `sop(...)`, and every method that reads the table, is a collective
            operation.
    """

    prior: Tensor | None

    def __init__(
        self,
        num_samples: int,
        num_classes: int,
        *,
        variant: Literal["flow", "paper", "official"] = "flow",
        visits: float | None = None,
        alpha_u: float | None = None,
        alpha_v: float | None = None,
        tau: float | None = None,
        lr_u: float | None = None,
        lr_v: float | None = None,
        batch_size: int | None = None,
        onset: Setting | None = None,
        target: float | None = None,
        layout: Literal["auto", "dense", "slots"] = "auto",
        slots: int = DEFAULT_SLOTS,
        seed: int = 0,
        eps: float | None = None,
        consistency: float = 0.0,
        balance: float = 0.0,
        prior: Tensor | None = None,
        epochs: float | None = None,
        reduction: Literal["mean", "sum", "none"] = "mean",
        validate: bool = True,
        device: torch.device | str | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        rank, ranks = _rank_and_ranks(process_group)
        given = {"visits": visits, "alpha_u": alpha_u, "alpha_v": alpha_v, "tau": tau}
        given |= {"lr_u": lr_u, "lr_v": lr_v, "batch_size": batch_size}
        if process_group is not None and ranks > 1:
            table = {"num_samples": num_samples, "num_classes": num_classes, "layout": layout, "slots": slots}
            terms = {"consistency": consistency, "balance": balance, "eps": eps, "reduction": reduction}
            more: dict[str, Any] = {"variant": variant, "onset": onset, "target": target, "seed": seed}
            more["prior"] = None if prior is None else prior.tolist()
            check_same_on_all_ranks(process_group, "SOP", {**table, **given, **terms, **more})
        onset = default_onset(variant) if onset is None else onset
        self.rates = make_rates(variant, {name: value for name, value in given.items() if value is not None})
        self.table = NoiseTable(
            num_samples, num_classes, layout=layout, slots=slots, seed=seed, first=rank, stride=ranks, device=device
        )
        self.exchange = None
        if process_group is not None and ranks > 1:
            self.exchange = Exchange(process_group, self.table)
            self.register_state_dict_pre_hook(lambda *_: self.flush())

        self.eps = max(SMALLEST_EPS, min(1e-4, 0.1 / num_classes)) if eps is None else eps
        if not SMALLEST_EPS <= self.eps < 1 / num_classes:
            raise ValueError(f"eps must be in [{SMALLEST_EPS:g}, 1/num_classes = {1 / num_classes:g}), got {self.eps}")
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
        for name, value in (("consistency", consistency), ("balance", balance)):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be a finite number >= 0, got {value!r}")
        if (consistency or balance) and reduction == "none":
            raise ValueError("consistency and balance are computed over the batch: they need reduction='mean' or 'sum'")
        self.consistency, self.balance = consistency, balance
        if variant != "flow" and onset != "always":
            raise ValueError(
                f"onset={onset!r} belongs to variant='flow'; variant={variant!r} acts from the first visit"
            )
        self._windows = Windows(num_samples, onset, device)
        self.table.voting = onset != "always"
        self._target = target
        if target is not None and (not (math.isfinite(target) and target >= 0) or (target and variant != "flow")):
            raise ValueError(f"target must be a finite number >= 0, and 0 unless variant='flow'; got {target!r}")
        self.register_state_dict_pre_hook(lambda *_: self.onset_state())
        self.register_load_state_dict_post_hook(lambda *_: self.load_onset_state(self._windows.state))
        for name in ("table", "_windows"):  # also plain attributes: torch's lookup of submodules is slow
            object.__setattr__(self, name, getattr(self, name))
        self.reduction, self.validate = reduction, validate
        self._warned = self._prefetches = False
        self.keep_corrected = False  # whether `corrected` is filled
        self.corrected: Tensor | None = None  # (B,) labels of the last batch, as the table corrected them before it
        self.register_buffer("prior", check_prior(prior, balance, num_classes, device), persistent=False)
        if epochs is not None:
            self._forecast(epochs, stacklevel=3)

    @property
    def num_classes(self) -> int:
        """K."""
        return self.table.num_classes

    @property
    def skipped(self) -> Tensor:
        """Number of samples that were skipped: [weight 0 or out of range, logits not finite]."""
        return self.table.skipped

    @property
    def epochs_observed(self) -> int:
        """Full epochs so far, until the table began to act: one visit per sample each."""
        return self._windows.gate.windows

    @property
    def target(self) -> float:
        """Weight of the pull towards what the table says; 0 if labels looked clean, because it reinforces mistakes."""
        windows = self._windows
        if windows.evidence is not None and windows.evidence.looks_clean:
            return 0.0
        if self._target is not None:
            return self._target
        return DEFAULT_TARGET if windows.gate.opened or self.table.voting else 0.0

    @property
    def tau(self) -> float:
        """The network's learning rate, by which the variant "paper" multiplies its rates."""
        return self._paper_rates("tau").tau

    @tau.setter
    def tau(self, value: float) -> None:
        rates = self._paper_rates("tau")
        self.rates = Paper(rates.alpha_u, rates.alpha_v, value)

    def _paper_rates(self, name: str) -> Paper:
        if not isinstance(self.rates, Paper):
            raise TypeError(f"{name} belongs to variant='paper'; this SOP has {self.rates}")
        return self.rates

    def _apply(self, fn: Any, recurse: bool = True) -> SOP:
        return super()._apply(keep_dtype(fn), recurse)

    def extra_repr(self) -> str:
        """One line for `print(sop)`."""
        plus = f", consistency={self.consistency}, balance={self.balance}" if self.consistency or self.balance else ""
        acts = "waits for the onset" if self.onset is None else f"acts since epoch {self.onset}"
        return f"{self.rates}, {acts}, eps={self.eps:g}{plus}, skipped {sum(self.skipped.tolist())} samples"

    # -- the loss ------------------------------------------------------------------------------------------------------

    def forward(
        self,
        logits: Tensor,
        labels: Tensor,
        index: Tensor,
        *,
        logits2: Tensor | None = None,
        weight: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of a batch and update its rows, except in `sop.eval()` mode or under `torch.no_grad()`.

        All samples of a batch read the table as it was before the batch. An index that occurs twice counts as two
        visits, in batch order. A sample is skipped if its weight is 0 or its logits are not all finite: its row does
        not change, it contributes nothing to the loss or the gradient, and `skipped` counts it.

        Args:
            logits: (B, K) float32, bfloat16 or float16 (float64 for tests); the arithmetic inside is float32.
            labels: (B,) integers in [0, K).
            index: (B,) integers in [0, N): the index of each sample, the same in every epoch.
            logits2: (B, K) logits of a second, strongly augmented view, for `consistency`.
            weight: (B,) sample weights >= 0, or a bool mask.
        """
        if torch.compiler.is_compiling():  # break the graph: torch.compile must not trace table updates
            loss: Tensor = torch.compiler.disable(self._loss)(logits, labels, index, logits2, weight)
            return loss
        return self._loss(logits, labels, index, logits2, weight)

    def _loss(
        self, logits: Tensor, labels: Tensor, index: Tensor, logits2: Tensor | None, weight: Tensor | None
    ) -> Tensor:
        check_batch(logits, labels, index, logits2, weight, self.table, wants_view=self.consistency > 0)
        labels, index = labels.to(torch.int64), index.to(torch.int64)
        weight = weight.to(torch.float32) if weight is not None and weight.dtype == torch.bool else weight
        wanted = self._wanted(labels, index, weight)
        keep = wanted
        if wanted is not None and not self.validate:
            labels, index = labels.where(wanted, 0), index.where(wanted, 0)
        if logits2 is not None:
            seen = torch.isfinite(logits2).all(dim=1)
            keep = seen if wanted is None else wanted & seen

        self._end_window()
        step = VOTES if self.table.voting else self.rates.step()
        kernels = choose_kernels(logits.device, logits.dtype)
        losses, facts = self._losses(logits, labels, index, keep, step, kernels)
        counts = facts.predicted != DROPPED
        counted = counts.sum()
        if self.training and torch.is_grad_enabled():
            self._update(labels, index, facts, step, kernels)
            self._count_skipped(len(index), counted, wanted)
        elif self.exchange is not None:
            self.exchange.skip(len(index))
        if weight is not None:
            share = torch.where(counts, weight, 0).to(losses.dtype)
            losses, total = losses * share, share.sum()
        else:
            share, total = counts.to(losses.dtype), counted.to(losses.dtype)
        if self.reduction == "none":
            return losses
        loss = losses.sum()
        if self.balance or self.consistency:
            loss = loss + self._plus_terms(logits, logits2, counts, share, total)
        if self.reduction == "sum":
            return loss
        if self.exchange is not None:  # so that the mean over ranks is the mean over all samples
            total = self.exchange.sum(total) / self.exchange.ranks
        return loss / total.where(total > 0, 1)

    def _losses(
        self, logits: Tensor, labels: Tensor, index: Tensor, keep: Tensor | None, step: Step, kernels: Kernels
    ) -> tuple[Tensor, Facts]:
        """Return the loss of each sample, and its facts. All rows are read as they were before the batch."""
        block, rows = self.table.block, index
        if self.exchange is not None:
            columns, rows = self.exchange.next_rows(index)
            block = RowBlock(*columns)
        if self.keep_corrected:
            self.corrected = labels if self.table.voting or not len(index) else corrected_labels(block, rows, labels)
        if not len(index):
            losses = logits.to(torch.promote_types(logits.dtype, torch.float32)).sum(1)
            return losses, Facts(index, *(torch.zeros_like(index, dtype=torch.float32) for _ in range(4)))
        reclip = step.rule == "official"
        if self.table.voting:
            with torch.no_grad():
                found = kernels.fused_loss(logits, labels, rows, block, keep, eps=self.eps, reclip=False, target=0.0)
            return _cross_entropy(logits, labels, found.facts.predicted != DROPPED), found.facts
        losses, *columns = FusedLoss.apply(logits, labels, rows, block, keep, self.eps, reclip, self.target, kernels)
        return losses, Facts(*columns)

    def _end_window(self) -> None:
        """After one visit per sample, decide whether the table starts to act. Waits for the device only then."""
        if not self.table.voting or (self.exchange is not None and not self.exchange.idle):
            return
        if self._windows.gate.setting == "always":
            self.table.act()
        elif self._windows.complete and self._windows.end(self._sum):
            found = self._windows.evidence = weigh(self._sum(self.table.evidence()))
            self.table.act(found.least_confidence)

    def _count(self, samples: int) -> None:
        if self.table.voting:
            self._windows.count(samples)

    def _sum(self, values: Tensor) -> Tensor:
        return values if self.exchange is None else self.exchange.sum(values)

    def onset_state(self) -> Tensor:
        """What the decision about the onset depends on, as numbers that are saved. With a process group, collective."""
        return self._windows.save(self._sum)

    def load_onset_state(self, state: Tensor) -> None:
        """Take over what `onset_state` returned, on any number of ranks."""
        self._windows.load(state, first_rank=self.table.first == 0)

    def _update(self, labels: Tensor, index: Tensor, facts: Facts, step: Step, kernels: Kernels) -> None:
        """Apply the facts to the rows of the samples, or send them to the ranks that own the rows."""

        def visit(rows: Tensor, labels: Tensor, facts: Facts) -> None:
            if len(rows):
                if step.rule == "votes":
                    self._windows.add(self.table, rows, facts)
                kernels.update_rows(self.table, rows, labels, facts, step)

        if self.exchange is None:
            visit(index, labels, facts)
            self._count(len(index))
            return

        def apply(rows: Tensor, columns: list[Tensor]) -> None:
            visit(rows, *from_wire(columns))

        before = self.exchange.samples
        if self.exchange.give(to_wire(labels, facts), apply) and not self._prefetches:
            self.exchange.flush()
        self._count(self.exchange.samples - before)

    def prefetch(self, parts: Sequence[NDArray[np.int64]]) -> None:
        """With a process group: start to send the rows of the next batch, given the sample indices of each rank.

        Call it one step ahead, once per batch, and the rows are sent while the network computes. The batch may then
        be passed as micro-batches (gradient accumulation). Facts are sent during the backward pass; `flush` after it,
        or the next batch, applies them. If a sample is in two consecutive batches, its row would be read before its
        first visit is applied: between epochs, call `flush` before `prefetch`.
        """
        if self.exchange is not None:
            self._prefetches = True
            self.exchange.prefetch(parts)

    def flush(self) -> None:
        """With a process group and `prefetch`: wait for pending facts, and update the rows that this rank owns.

        At the end of an epoch this also decides whether the table starts to act, as the next `sop(...)` would.
        """
        if self.exchange is not None:
            self.exchange.flush()
        self._end_window()

    def _plus_terms(
        self, logits: Tensor, logits2: Tensor | None, counts: Tensor, share: Tensor, total: Tensor
    ) -> Tensor:
        """Return the terms of SOP+, times the total weight of the batch.

        The logits of skipped samples are replaced by 0 before the softmax, so that a NaN does not spread.
        """
        terms = []
        safe = logits.to(share.dtype).where(counts[:, None], 0)
        if self.prior is not None:
            sums = torch.cat([weighted_prediction(safe, share), total[None]])  # (K + 1,)
            if self.exchange is not None:
                sums = as_share_of_all(sums, self.exchange.sum(sums), total)
            terms.append(self.balance * total * balance_term(sums[:-1], sums[-1], self.prior))
        if logits2 is not None:
            safe2 = logits2.to(share.dtype).where(counts[:, None], 0)
            terms.append(self.consistency * consistency_term(safe, safe2, share))
        return torch.stack(terms).sum()

    def _wanted(self, labels: Tensor, index: Tensor, weight: Tensor | None) -> Tensor | None:
        """Mask of samples with a positive weight and, if not validated, a label and index in range; None = all."""
        if self.validate:
            check_values(labels, index, self.table)
            return None if weight is None else check_weight(weight)
        inside = (labels >= 0) & (labels < self.num_classes) & (index >= 0) & (index < self.num_samples)
        return inside if weight is None else inside & torch.isfinite(weight) & (weight > 0)

    def _count_skipped(self, batch: int, counted: Tensor, wanted: Tensor | None) -> None:
        """Add `batch - counted` samples to `skipped`, by reason: no weight, or logits that are not finite."""
        on_cpu = counted.device.type == "cpu"
        if on_cpu and int(counted) == batch:  # the common case; on a GPU the check would synchronize
            return
        asked = torch.full_like(counted, batch) if wanted is None else wanted.sum()
        not_finite = asked - counted
        self.table.skipped += torch.stack((batch - asked, not_finite))
        # Warn once: divergence must not look like convergence. On a GPU, `skipped` is the only sign.
        if on_cpu and not self._warned and int(not_finite):
            self._warned = True
            message = f"{int(not_finite)} of {batch} samples in a batch have logits that are not finite"
            warnings.warn(f"{message}: they are skipped, and `sop.skipped` counts them", stacklevel=6)

    def forecast(self, epochs: float) -> Forecast:
        """Predict after how many visits the table can act on a label. Warn if fewer epochs are planned."""
        return self._forecast(epochs, stacklevel=3)

    def _forecast(self, epochs: float, stacklevel: int) -> Forecast:
        if not epochs > 0:
            raise ValueError(f"epochs must be a number > 0, got {epochs!r}")
        found = forecast(self.rates, self._windows.gate.setting, epochs)
        if not found.activates:
            warnings.warn(str(found), InactiveTableWarning, stacklevel=stacklevel)
        return found


def _cross_entropy(logits: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
    """Plain cross-entropy of each sample, (B,), with 0 for those that do not count: torch's own, bit for bit."""
    z = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(z.where(counts[:, None], 0), labels, reduction="none").where(counts, 0)


def _rank_and_ranks(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Rank and size of the group. Warn if there are several ranks but no group: each would have its own table."""
    if group is not None:
        return dist.get_rank(group), dist.get_world_size(group)
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        warnings.warn(
            f"each of the {dist.get_world_size()} ranks has its own table: a label is flagged only if the same rank"
            " sees its sample in every epoch. Pass process_group=torch.distributed.new_group()",
            stacklevel=3,
        )
    return 0, 1
