"""Results of a trained noise table: noise scores, suspects, flags, proposed labels, the noise rate.

Reads the columns of the table. Does not know how they were trained.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ..sample_table import Exchange
from .checks import check_labels
from .rows import NoiseTable

_ACTIVE = 0.01  # a square of u or v below this has no effect


class Readout:
    """Methods of `SOP` that read the table without changing it."""

    table: NoiseTable
    exchange: Exchange | None

    @property
    def num_samples(self) -> int:
        """N."""
        return self.table.num_samples

    def noise_scores(self, kind: Literal["loss", "margin"] = "loss") -> Tensor:
        """Noise score of each label, (N,) float32: higher = more likely wrong; -inf for samples never visited.

        It is the running mean of the network's own loss (or of its negative margin) on the given label. It ranks labels
        better than s itself, which saturates.
        """
        if kind not in ("loss", "margin"):
            raise ValueError(f"kind must be 'loss' or 'margin', got {kind!r}")
        scores = self._gather(self.table.mean_loss) if kind == "loss" else -self._gather(self.table.mean_margin)
        return scores.where(self.visited(), -torch.inf)

    def visited(self) -> Tensor:
        """(N,) bool: the sample was visited at least once."""
        return self._gather(self.table.visits) > 0

    @property
    def provisional(self) -> bool:
        """Whether the table does not act yet: flags are those it would start with, and nothing is proposed."""
        return self.table.voting

    def active(self) -> Tensor:
        """(N,) bool: the table affects the loss of this sample: u^2 or some v_k^2 exceeds 0.01."""
        self._flush()
        if self.table.voting:
            return self._gather(torch.zeros_like(self.table.visits, dtype=torch.bool))
        size = torch.maximum(self.table.strongest()[0], self.table.u.square())
        return self._gather(size > _ACTIVE)

    def suspects(self, count: int) -> Tensor:
        """Indices of the `count` samples whose labels are most likely wrong, worst first.

        Only visited samples are returned, so the result may have fewer than `count` entries.
        """
        if not 0 <= count <= self.num_samples:
            raise ValueError(f"count must be in [0, num_samples = {self.num_samples}], got {count!r}")
        visited = int(self.visited().sum())
        return self.noise_scores().sort(descending=True, stable=True).indices[: min(count, visited)]

    def flags(self, labels: Tensor | None = None) -> Tensor:
        """(N,) bool: the label is absorbed by the noise term, in favour of some class k: v_k^2 > 1 - u^2.

        Pass the current labels (N,) if some were changed during training. The entry of a class that has since become
        the label is then ignored. Before the onset (`provisional`): the votes of its visits contradict the label.
        """
        return self._flagged(labels)[0]

    def proposed_labels(self, labels: Tensor) -> Tensor:
        """The given labels of all samples (N,), with each flagged label replaced by the class of its largest v^2.

        Review the proposals: where few labels are wrong, accepting all of them makes the labels worse. Before the onset
        (`provisional`) there are none.
        """
        if self.provisional:
            check_labels(labels, self.table)
            return labels.clone()
        flagged, instead = self._flagged(labels)
        return torch.where(flagged, instead, labels.to(instead.device, torch.int64)).to(labels.dtype)

    def noise_rate(self, labels: Tensor | None = None) -> float:
        """Estimated fraction of wrong labels: flagged / visited samples; NaN before the first visit."""
        visited = self.visited()
        return float((self.flags(labels) & visited).sum() / visited.sum())

    def _flagged(self, labels: Tensor | None) -> tuple[Tensor, Tensor]:
        """Whether each label is flagged, and in favour of which class, (N,) each.

        v^2 must exceed 0.01: in the variant `paper`, u alone reaches 1 on hard clean samples.
        """
        if labels is not None:
            check_labels(labels, self.table)
            labels = labels.to(self.table.u.device, torch.int64)[self.table.first :: self.table.stride]
        self._flush()
        if self.table.voting:
            contradicted, class_ = self.table.votes()
            return self._gather(contradicted), self._gather(class_)
        square, class_ = self.table.strongest(labels)
        flagged = square > (1 - self.table.u.square()).clamp_min(_ACTIVE)
        return self._gather(flagged), self._gather(class_)

    def evictions(self) -> tuple[int, float]:
        """For slots: number of evicted entries, and the largest evicted v^2; (0, 0.0) = equal to dense, bit for bit.

        A dense table always returns (0, 0.0), even if it was loaded from slots with evictions.
        The evicted v^2 bounds the error of s at every class that was not predicted again after its eviction. A class
        that was predicted again starts from its initial value, and lags behind by at most its earlier visits.
        """
        if self.table.evictions is None or self.table.evicted is None:
            return 0, 0.0
        return int(self._gather(self.table.evictions).sum()), float(self._gather(self.table.evicted).max())

    def _gather(self, column: Tensor) -> Tensor:
        """Return a column for all samples (N,), gathered from all ranks."""
        self._flush()
        return column if self.exchange is None else self.exchange.gather_column(column)

    def _flush(self) -> None:
        if self.exchange is not None:
            self.exchange.flush()
