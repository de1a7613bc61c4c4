"""What a noise table says about the labels after training: scores, suspects, flags, proposals, the noise rate.

Knows the table's columns and what they mean, nothing of how they came about.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from .checks import check_labels
from .exchange import Exchange
from .rows import NoiseTable

_ACTIVE = 0.01  # a square of u or v below this says nothing


class Reading:
    """The methods of `SOP` that read its table and change nothing."""

    table: NoiseTable
    exchange: Exchange | None

    @property
    def num_samples(self) -> int:
        """N."""
        return self.table.num_samples

    def noise_scores(self, kind: Literal["loss", "margin"] = "loss") -> Tensor:
        """How suspicious each label is, (N,) float32, higher = more likely wrong; -inf for samples never visited.

        The running mean of the network's own loss (or of minus its margin) on the given label. It ranks better than s
        itself, which saturates.
        """
        if kind not in ("loss", "margin"):
            raise ValueError(f"kind must be 'loss' or 'margin', got {kind!r}")
        scores = self._whole(self.table.mean_loss) if kind == "loss" else -self._whole(self.table.mean_margin)
        return scores.where(self.visited(), -torch.inf)

    def visited(self) -> Tensor:
        """(N,) bool: samples that were visited at least once."""
        return self._whole(self.table.visits) > 0

    def active(self) -> Tensor:
        """(N,) bool: the table acts on this sample: u^2 or some v_k^2 has grown to a percent."""
        self._settled()
        size = torch.maximum(self.table.strongest()[0], self.table.u.square())
        return self._whole(size > _ACTIVE)

    def suspects(self, count: int) -> Tensor:
        """Numbers of the `count` samples whose labels are most likely wrong, the most suspicious first.

        Only samples that were visited: fewer than `count` if there are fewer.
        """
        if not 0 <= count <= self.num_samples:
            raise ValueError(f"count must be in [0, num_samples = {self.num_samples}], got {count!r}")
        visited = int(self.visited().sum())
        return self.noise_scores().sort(descending=True, stable=True).indices[: min(count, visited)]

    def flags(self, labels: Tensor | None = None) -> Tensor:
        """(N,) bool: the table has explained this label away in favour of some class k: v_k^2 > 1 - u^2.

        Pass the current labels (N,) if some were changed during training: what the table learned of a class that has
        become the label since then says nothing against it.
        """
        return self._explained_away(labels)[0]

    def proposed_labels(self, labels: Tensor) -> Tensor:
        """The given labels of all samples (N,), with each flagged one replaced by the class of its largest v^2.

        A proposal for a person to look at: where little is wrong to begin with, taking all of it makes labels worse.
        """
        flagged, instead = self._explained_away(labels)
        return torch.where(flagged, instead, labels.to(instead.device, torch.int64)).to(labels.dtype)

    def noise_rate(self, labels: Tensor | None = None) -> float:
        """Estimated share of wrong labels: flagged among visited samples; NaN before the first visit."""
        visited = self.visited()
        return float((self.flags(labels) & visited).sum() / visited.sum())

    def _explained_away(self, labels: Tensor | None) -> tuple[Tensor, Tensor]:
        """Which labels are explained away, and in favour of which class, (N,) each.

        An entry counts from one percent: in the variant `paper` u alone reaches 1 on hard clean samples.
        """
        if labels is not None:
            check_labels(labels, self.table)
            labels = labels.to(self.table.u.device, torch.int64)[self.table.first :: self.table.stride]
        self._settled()
        square, class_ = self.table.strongest(labels)
        flagged = square > (1 - self.table.u.square()).clamp_min(_ACTIVE)
        return self._whole(flagged), self._whole(class_)

    def evictions(self) -> tuple[int, float]:
        """For slots: how many entries were evicted, and the largest v^2 given up; (0, 0.0) = dense, bit for bit.

        A dense table always answers (0, 0.0), also one that was loaded from slots with evictions.
        That v^2 bounds the error of s at every class that was not predicted again after its eviction. One that was
        starts anew and lags behind by at most the visits it had before.
        """
        if self.table.evictions is None or self.table.evicted is None:
            return 0, 0.0
        return int(self._whole(self.table.evictions).sum()), float(self._whole(self.table.evicted).max())

    def _whole(self, column: Tensor) -> Tensor:
        """A column of all samples (N,), where ranks own rows of it each."""
        self._settled()
        return column if self.exchange is None else self.exchange.whole(column)

    def _settled(self) -> None:
        if self.exchange is not None:
            self.exchange.settle()
