"""Training metrics of the samples since the last line: sums that stay on the device, so that no step waits for them.

Knows about outputs and labels. The caller sums over ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...data.batch import Batch
from ...methods import StepOutput

SUMS = (
    "loss",  # over samples that count and whose logits are finite
    "finite",  # how many these are
    "samples",  # that count: readable, labelled, no padding
    "correct",  # of these predicted as their given label
    "known",  # of these with a known clean label
    "clean_correct",  # of the known ones predicted as the clean label
    "wrong",  # of the known ones with another given label
    "memorised",  # of the wrong ones predicted as the given label
    "nonfinite",  # samples that count, but whose logits or loss are not finite
)


class StepMetrics:
    """Sums over the samples of one rank, in float64 where the device has it."""

    def __init__(self, device: torch.device | str) -> None:
        device = torch.device(device)
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self.sums = torch.zeros(len(SUMS), dtype=dtype, device=device)

    @torch.no_grad()
    def add(self, output: StepOutput, batch: Batch, clean: Tensor | None = None) -> Tensor:
        """Count a batch, given the method's output and the clean labels (B,), -1 where unknown.

        Returns which samples (B,) count but are not finite.
        """
        loss, counts = output.loss, batch.weight > 0  # (B,) here and below
        finite = output.finite & torch.isfinite(loss)
        predicted = output.logits.argmax(dim=1)
        right = (predicted == batch.labels) & counts & finite
        if clean is None:
            known = clean_right = wrong = torch.zeros_like(counts)
        else:
            known = (clean >= 0) & counts
            clean_right = (predicted == clean) & known & finite
            wrong = (batch.labels != clean) & known
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
        """The sums, in the order of SUMS; resets them. The host waits for the device here."""
        sums: list[float] = self.sums.tolist()
        self.sums.zero_()
        return sums


def metrics_of(sums: Sequence[float]) -> dict[str, Any]:
    """Means from sums of one rank or of all ranks. None where there are no samples.

    `memorised` is the share of wrong labels that the network predicts as given; it and `clean_accuracy` need clean
    labels.
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
