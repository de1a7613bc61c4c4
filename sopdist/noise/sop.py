"""SOP, the loss: five lines in anybody's training loop.

    sop = SOP(num_samples=len(dataset), num_classes=14)
    for images, labels, index in loader:          # index: each sample's fixed number in [0, N)
        loss = sop(model(images), labels, index)  # u and v of these samples are updated in place
        loss.backward(); optimizer.step(); optimizer.zero_grad()
    sop.suspects(100)                             # the samples whose labels are most likely wrong

For a sample with label y the network's prediction p is not compared with y itself but with y after a correction s that
is learned for this sample alone:

    s = u^2 at y, -v_k^2 at every other class k          loss = -log phi(p + s)_y,   phi clips at eps and normalises

s starts at nothing (1e-16) and grows only where the network keeps contradicting the label, visit after visit. A network
learns what many samples share before it memorises what one sample says alone; by then s has explained the wrong label
away.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import fields
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .checks import check_batch, check_prior, check_values, check_weight
from .kernels import DROPPED, Facts, LossResult, choose_kernels
from .plus import balance_term, consistency_term
from .rates import VARIANTS, Forecast, InactiveTableWarning, Paper, Rates
from .reading import Reading
from .rows import DEFAULT_SLOTS, NoiseTable, keep_type

# Below this an initial v^2 could show in p - v^2, and slots would no longer equal dense bit for bit.
SMALLEST_EPS = 1e-6


class SOP(Reading, nn.Module):
    """The SOP and SOP+ loss with its noise table.

    Args:
        num_samples: N; every index is in [0, N).
        num_classes: K.
        variant: how a visit moves u and v. "flow" (default) is the exact solution of the paper's gradient flow over one
            visit, set by `visits` alone and independent of learning rate, batch size and world size. "paper" takes
            projected steps of size alpha * tau, "official" the steps of the authors' published code.
        visits: for "flow": visits of steady disagreement after which a label is explained away (default 4).
        alpha_u, alpha_v, tau: for "paper" (default 10, 10, 0.02). Assign to `sop.tau` when the learning rate changes.
        lr_u, lr_v, batch_size: for "official" (default 1, 10, 128).
        layout: "dense" keeps v of all classes, "slots" only the entries that ever moved; "auto" picks by bytes.
        slots: how many entries a row can hold in the layout "slots".
        seed: of the table's initial values.
        eps: where phi clips; default the authors' 1e-4, or 0.1/K where that is less (at 1e-4 a network with more than
            10,000 classes would start with everything clipped, and without gradient).
        consistency, balance, prior: weights of the two terms of SOP+. `consistency` needs `logits2`, the second view;
            `prior` (K,) is what the mean prediction is pulled towards, uniform by default.
        epochs: the planned epochs, if known: warns at once if the table cannot act within them.
        reduction: "mean" over the samples that count, "sum", or "none" for the losses (B,), without the SOP+ terms.
        validate: check the values of labels, index and weight in every batch. On a GPU this waits for the device;
            switch it off once the loader is trusted. Samples out of range are then dropped and counted instead.
        device: where to put the table.
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
    ) -> None:
        super().__init__()
        given = {"visits": visits, "alpha_u": alpha_u, "alpha_v": alpha_v, "tau": tau}
        given |= {"lr_u": lr_u, "lr_v": lr_v, "batch_size": batch_size}
        self.rates = _make_rates(variant, {name: value for name, value in given.items() if value is not None})
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            ranks = torch.distributed.get_world_size()
            if ranks > 1:
                warnings.warn(
                    f"each of the {ranks} ranks has a table of its own: a label is explained away only if its sample is"
                    " seen by the same rank in every epoch",
                    stacklevel=2,
                )
        self.table = NoiseTable(num_samples, num_classes, layout=layout, slots=slots, seed=seed, device=device)

        self.eps = max(SMALLEST_EPS, min(1e-4, 0.1 / num_classes)) if eps is None else eps
        if not SMALLEST_EPS <= self.eps < 1 / num_classes:
            raise ValueError(f"eps must be in [{SMALLEST_EPS:g}, 1/num_classes = {1 / num_classes:g}), got {self.eps}")
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
        for name, value in (("consistency", consistency), ("balance", balance)):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be a finite number >= 0, got {value!r}")
        if (consistency or balance) and reduction == "none":
            raise ValueError("consistency and balance are terms of a whole batch: they need reduction='mean' or 'sum'")
        self.consistency, self.balance = consistency, balance
        self.reduction, self.validate = reduction, validate
        self._warned = False
        self.register_buffer("prior", check_prior(prior, balance, num_classes, device), persistent=False)
        if epochs is not None:
            self._forecast(epochs, stacklevel=3)

    @property
    def num_classes(self) -> int:
        """K."""
        return self.table.num_classes

    @property
    def skipped(self) -> Tensor:
        """How many samples were seen but did not count: [weight 0 or out of range, logits not finite]."""
        return self.table.skipped

    @property
    def tau(self) -> float:
        """The network's learning rate, which the variant "paper" multiplies its rates with."""
        return self._paper_rates("tau").tau

    @tau.setter
    def tau(self, value: float) -> None:
        rates = self._paper_rates("tau")
        self.rates = Paper(rates.alpha_u, rates.alpha_v, value)

    def _paper_rates(self, name: str) -> Paper:
        if not isinstance(self.rates, Paper):
            raise TypeError(f"{name} belongs to variant='paper'; this is {self.rates}")
        return self.rates

    def _apply(self, fn: Any, recurse: bool = True) -> SOP:
        return super()._apply(keep_type(fn), recurse)

    def extra_repr(self) -> str:
        """One line for `print(sop)`."""
        plus = f", consistency={self.consistency}, balance={self.balance}" if self.consistency or self.balance else ""
        return f"{self.rates}, eps={self.eps:g}{plus}, skipped {sum(self.skipped.tolist())} samples"

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
        """The loss of a batch; its samples' rows are updated, unless in `sop.eval()` or under `torch.no_grad()`.

        All samples of a batch read the table as it was before the batch. An index that comes twice counts as two
        visits, in batch order. A sample with weight 0, or whose logits are not all finite, counts in nothing: its row
        stays as it is, it adds nothing to the loss or the gradient, and `skipped` counts it.

        Args:
            logits: (B, K) float32, bfloat16 or float16 (float64 for tests); the arithmetic inside is float32.
            labels: (B,) integers in [0, K).
            index: (B,) integers in [0, N): each sample's number, the same in every epoch.
            logits2: (B, K) of a second, strongly augmented view, for `consistency`.
            weight: (B,) weights >= 0 of the samples in the mean, or a mask.
        """
        if torch.compiler.is_compiling():  # torch.compile must not trace updates of the table: break the graph here
            loss: Tensor = torch.compiler.disable(self._loss)(logits, labels, index, logits2, weight)
            return loss
        return self._loss(logits, labels, index, logits2, weight)

    def _loss(
        self, logits: Tensor, labels: Tensor, index: Tensor, logits2: Tensor | None, weight: Tensor | None
    ) -> Tensor:
        check_batch(logits, labels, index, logits2, weight, self.table, wants_view=self.consistency > 0)
        if not len(index):
            empty = logits.to(torch.promote_types(logits.dtype, torch.float32)).sum(1)
            return empty if self.reduction == "none" else empty.sum()
        labels, index = labels.to(torch.int64), index.to(torch.int64)
        weight = weight.to(torch.float32) if weight is not None and weight.dtype == torch.bool else weight
        wanted = self._wanted(labels, index, weight)
        keep = wanted
        if wanted is not None and not self.validate:
            labels, index = labels.where(wanted, 0), index.where(wanted, 0)
        if logits2 is not None:
            seen = torch.isfinite(logits2).all(dim=1)
            keep = seen if wanted is None else wanted & seen

        step = self.rates.step()
        kernels = choose_kernels(logits.device, logits.dtype)
        losses, *columns = _FusedLoss.apply(
            logits, labels, index, self.table, keep, self.eps, step.rule == "official", kernels
        )
        facts = Facts(*columns)
        counts = facts.predicted != DROPPED
        number = counts.sum()
        if self.training and torch.is_grad_enabled():
            kernels.update_rows(self.table, index, labels, facts, step)
            self._count_skipped(len(index), number, wanted)
        if weight is not None:
            share = torch.where(counts, weight, 0).to(losses.dtype)
            losses, total = losses * share, share.sum()
        else:
            share, total = counts.to(losses.dtype), number
        if self.reduction == "none":
            return losses
        divisor = total.where(total > 0, 1)
        loss = losses.sum() / divisor
        if self.balance or self.consistency:
            loss = loss + self._plus_terms(logits, logits2, counts, share / divisor)
        return loss if self.reduction == "mean" else loss * total

    def _plus_terms(self, logits: Tensor, logits2: Tensor | None, counts: Tensor, share: Tensor) -> Tensor:
        """The terms of SOP+. Samples that do not count are replaced before the softmax, so a NaN reaches no other."""
        terms = []
        safe = logits.to(share.dtype).where(counts[:, None], 0)
        if self.prior is not None:
            terms.append(self.balance * balance_term(safe, self.prior, share))
        if logits2 is not None:
            safe2 = logits2.to(share.dtype).where(counts[:, None], 0)
            terms.append(self.consistency * consistency_term(safe, safe2, share))
        return torch.stack(terms).sum()

    def _wanted(self, labels: Tensor, index: Tensor, weight: Tensor | None) -> Tensor | None:
        """Which samples have a weight and, unless that has been checked, a label and an index in range; None = all."""
        if self.validate:
            check_values(labels, index, self.table)
            return None if weight is None else check_weight(weight)
        inside = (labels >= 0) & (labels < self.num_classes) & (index >= 0) & (index < self.num_samples)
        return inside if weight is None else inside & torch.isfinite(weight) & (weight > 0)

    def _count_skipped(self, batch: int, number: Tensor, wanted: Tensor | None) -> None:
        """`number` samples counted; the others had no weight, or logits that are not finite."""
        on_cpu = number.device.type == "cpu"
        if on_cpu and int(number) == batch:  # the common case; elsewhere asking would wait for the device
            return
        asked = torch.full_like(number, batch) if wanted is None else wanted.sum()
        not_finite = asked - number
        self.table.skipped += torch.stack((batch - asked, not_finite))
        # Once: a network that has diverged must not look like one that has converged. On a GPU `skipped` tells.
        if on_cpu and not self._warned and int(not_finite):
            self._warned = True
            message = f"{int(not_finite)} of {batch} samples of a batch have logits that are not finite"
            warnings.warn(f"{message}: they are left out of the loss, and `sop.skipped` counts them", stacklevel=6)

    def forecast(self, epochs: float) -> Forecast:
        """In how many visits a steadily contradicted label is explained away; warns if fewer epochs are planned."""
        return self._forecast(epochs, stacklevel=3)

    def _forecast(self, epochs: float, stacklevel: int) -> Forecast:
        if not epochs > 0:
            raise ValueError(f"epochs must be a number > 0, got {epochs!r}")
        forecast = Forecast(self.rates.visits_to_activate(), epochs, self.rates)
        if not forecast.activates:
            warnings.warn(str(forecast), InactiveTableWarning, stacklevel=stacklevel)
        return forecast


class _FusedLoss(torch.autograd.Function):
    """The kernel computes the gradient of the logits with the loss; backward only scales it."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        index: Tensor,
        table: NoiseTable,
        keep: Tensor | None,
        eps: float,
        reclip: bool,
        kernels: Any,
    ) -> tuple[Tensor, ...]:
        result: LossResult = kernels.fused_loss(logits, labels, index, table.block, keep, eps=eps, reclip=reclip)
        ctx.save_for_backward(result.gradient, result.scale)
        ctx.dtype = logits.dtype
        ctx.mark_non_differentiable(*result.facts)
        return result.losses, *result.facts

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        gradient, scale = ctx.saved_tensors
        # Scale in float32 before rounding to the logits' type: under loss scaling, float16 would underflow otherwise.
        return (gradient * (grad * scale)[:, None]).to(ctx.dtype), *(None,) * 7


def _make_rates(variant: str, given: dict[str, Any]) -> Rates:
    """The chosen rule from the settings that were given; a setting of another rule is an error."""
    if variant not in VARIANTS:
        raise ValueError(f"variant must be one of {', '.join(map(repr, VARIANTS))}, got {variant!r}")
    rule = VARIANTS[variant]
    allowed = [field.name for field in fields(rule)]
    for name in given:
        if name not in allowed:
            owner = next(other for other, rates in VARIANTS.items() if name in {field.name for field in fields(rates)})
            raise ValueError(f"{name} belongs to variant={owner!r}; variant={variant!r} takes {', '.join(allowed)}")
    return rule(**given)
