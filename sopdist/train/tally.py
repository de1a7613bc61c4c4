"""What happened to the samples since the last look: sums that stay on the device, so that no step waits for them.

It knows logits and labels, not where they come from; sums over ranks are the caller's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..data.batch import Batch

SUMS = (
    "loss",  # over samples that count and whose logits are finite
    "finite",  # how many these are
    "samples",  # that count: readable, labelled, no gap
    "correct",  # of these predicted as their given label
    "known",  # of these with a known truth
    "clean_correct",  # of the known ones predicted as the truth
    "wrong",  # of the known ones with a given label that is not the truth
    "memorised",  # of the wrong ones predicted as the given label
    "nonfinite",  # samples that count, but whose logits or loss are not finite
)


class Tally:
    """Sums over the samples of one rank, in float64 where the device has it."""

    def __init__(self, device: torch.device | str) -> None:
        device = torch.device(device)
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self.sums = torch.zeros(len(SUMS), dtype=dtype, device=device)

    @torch.no_grad()
    def add(
        self, logits: Tensor, loss: Tensor, batch: Batch, truth: Tensor | None = None, logits2: Tensor | None = None
    ) -> Tensor:
        """Count a batch: its logits (B, K), its loss summed over the samples, the truth (B,), -1 where unknown.

        With a second view a sample is finite if both of them are. Returns which samples (B,) count but are not finite.
        """
        counts = batch.weight > 0  # (B,) here and below
        finite = torch.isfinite(logits).all(dim=1) & torch.isfinite(loss)
        if logits2 is not None:
            finite &= torch.isfinite(logits2).all(dim=1)
        predicted = logits.argmax(dim=1)
        right = (predicted == batch.labels) & counts & finite
        if truth is None:
            known = clean_right = wrong = torch.zeros_like(counts)
        else:
            known = (truth >= 0) & counts
            clean_right = (predicted == truth) & known & finite
            wrong = (batch.labels != truth) & known
        bad = ~finite & counts
        columns = [
            finite & counts, counts, right, known, clean_right, wrong, right & wrong, bad,
        ]  # in the order of SUMS, from the second on  # fmt: skip
        dtype = self.sums.dtype
        numbers = torch.stack(columns).to(dtype).sum(dim=1)  # (8,)
        self.sums[0] += loss.to(dtype).where(torch.isfinite(loss), 0)
        self.sums[1:] += numbers
        return bad

    def take(self) -> list[float]:
        """The sums, in the order of SUMS, and start anew. Here the host waits for the device."""
        sums: list[float] = self.sums.tolist()
        self.sums.zero_()
        return sums


def metrics_of(sums: Sequence[float]) -> dict[str, Any]:
    """From sums, of one rank or added up over all of them, to means. What has no samples is None.

    `memorised` is the share of wrong labels that the network has learned by heart; it and `clean_accuracy` are there if
    the truth is.
    """
    of = dict(zip(SUMS, sums, strict=True))
    metrics: dict[str, Any] = {
        "loss": _share(of["loss"], of["finite"]),
        "accuracy": _share(of["correct"], of["samples"]),
        "samples": int(of["samples"]),
        "nonfinite": int(of["nonfinite"]),
    }
    if of["known"]:
        metrics["clean_accuracy"] = _share(of["clean_correct"], of["known"])
        metrics["memorised"] = _share(of["memorised"], of["wrong"])
    return metrics


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
