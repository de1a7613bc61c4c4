"""Results of a trained noise table: noise scores, suspects, flags, proposed labels, the noise rate.

Reads the columns of the table, and what was decided at the onset. Does not know how they were trained.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..sample_table import Exchange
from .checks import check_labels
from .evidence import Evidence, weigh
from .rows import ACTIVE, NoiseTable
from .windows import Windows

_LATE = 0.9  # an onset after this share of the run leaves too few visits to trust the flags
_FEW_WRONG = 0.25  # noise rate below which flags have to be less ambiguous
_AMBIGUOUS, _AMBIGUOUS_IF_FEW = 1.0, 0.5  # ambiguous labels per contradicted label


class Judgement(NamedTuple):
    """What a table says about the labels as a whole."""

    flags: Tensor  # (N,) bool
    classes: Tensor  # (N,) int64: in favour of which each is flagged
    rate: float
    interval: tuple[float, float]
    doubts: list[str]

    def proposed(self, labels: Tensor) -> Tensor:
        """The labels (N,), with flagged ones replaced unless there are doubts."""
        if self.doubts:
            return labels.clone()
        return torch.where(self.flags, self.classes, labels.to(self.classes.device, torch.int64)).to(labels.dtype)


class Readout:
    """Methods of `SOP` that read the table without changing it."""

    table: NoiseTable
    exchange: Exchange | None
    _windows: Windows

    @property
    def num_samples(self) -> int:
        """N."""
        return self.table.num_samples

    @property
    def onset(self) -> int | None:
        """After how many epochs the table started to act: 0 = from the first visit, None = not yet."""
        return None if self.table.voting else self._windows.gate.opened or 0

    @property
    def contradicted_fit(self) -> float | None:
        """The sign of the onset: mean p_y of labels that earlier visits contradicted, in the last epoch before it.

        It falls or stays level while the network learns, and rises once it memorises labels. None: not known yet.
        """
        return self._windows.gate.fit

    def noise_scores(self, kind: Literal["combined", "loss", "margin"] = "combined") -> Tensor:
        """Noise score of each label, (N,) float32: higher = more likely wrong; -inf for samples never visited.

        It is a running mean over the visits. "loss" is that of the network's own loss on the given label, which is best
        if labels are wrong at random. "margin" is that of the largest other p minus p_y, which is best if classes are
        confused. "combined", from 0 to 1, is close to the better one in both cases: the mean of 1 - p_y and of
        (1 - margin) / 2.
        """
        if kind == "loss":
            scores = self.table.mean_loss
        elif kind == "margin":
            scores = -self.table.mean_margin
        elif kind == "combined":
            scores = (1 - self.table.mean_fit) / 2 + (1 - self.table.mean_margin) / 4
        else:
            raise ValueError(f"kind must be 'combined', 'loss' or 'margin', got {kind!r}")
        return self._gather(scores.where(self.table.visits > 0, -torch.inf))

    def visited(self) -> Tensor:
        """(N,) bool: the sample was visited at least once."""
        return self._gather(self.table.visits) > 0

    @property
    def provisional(self) -> bool:
        """Whether flags are no more than a hint; then nothing is proposed. `doubts` says why."""
        return bool(self.doubts())

    def doubts(self) -> list[str]:
        """Why the flags are provisional, for users; empty if they are not."""
        return self.judge().doubts

    def active(self) -> Tensor:
        """(N,) bool: the table affects the loss of this sample: u^2 or some v_k^2 exceeds 0.01."""
        self._flush()
        if self.table.voting:
            return self._gather(torch.zeros_like(self.table.visits, dtype=torch.bool))
        size = torch.maximum(self.table.strongest()[0], self.table.u.square())
        return self._gather(size > ACTIVE)

    def suspects(self, count: int) -> Tensor:
        """Indices of the `count` samples whose labels are most likely wrong, worst first.

        Only visited samples are returned, so the result may have fewer than `count` entries.
        """
        if not 0 <= count <= self.num_samples:
            raise ValueError(f"count must be in [0, num_samples = {self.num_samples}], got {count!r}")
        visited = int(self.visited().sum())
        return self.noise_scores().sort(descending=True, stable=True).indices[: min(count, visited)]

    def flags(self, labels: Tensor | None = None) -> Tensor:
        """(N,) bool: the label is probably wrong.

        The noise term has absorbed it in favour of some class k: v_k^2 > 1 - u^2. And the visits favoured another class
        at least as clearly as they favour the labels on average. Before the onset, the votes of the visits stand in for
        the noise term; see `provisional`.

        Pass the current labels (N,) if some were changed during training. The entry of a class that has since become
        the label is then ignored.
        """
        return self._flagged(labels)[0]

    def proposed_labels(self, labels: Tensor) -> Tensor:
        """The given labels of all samples (N,), with each flagged label replaced by the class of its largest v^2.

        Review the proposals: where few labels are wrong, accepting all of them makes the labels worse. While flags are
        `provisional`, there are none.
        """
        return self.judge(labels).proposed(labels)

    def noise_rate(self, labels: Tensor | None = None) -> float:
        """Estimated fraction of wrong labels; NaN before the first visit. `noise_rate_interval` is its uncertainty.

        It is the share of flags. Before the onset, it is estimated from how often sure predictions contradict a label,
        compared with all: what a weak network contradicts is mostly correct, but what it is sure of is not.
        """
        return self.judge(labels).rate

    def noise_rate_interval(self, labels: Tensor | None = None) -> tuple[float, float]:
        """Lower and upper estimate of the fraction of wrong labels; NaN before the first visit.

        The lower one counts only what the network is surest of, the upper one everything that it contradicts. Labels
        that are wrong in a way that the network learns as a pattern are in neither.
        """
        return self.judge(labels).interval

    def judge(self, labels: Tensor | None = None) -> Judgement:
        """Everything that the table says about the labels as a whole, computed together."""
        flags, classes = self._flagged(labels)
        visits = self._gather(self.table.visits)
        visited = int((visits > 0).sum())
        if not visited:
            return Judgement(flags, classes, math.nan, (math.nan, math.nan), self._doubts(0.0, 0.0))
        flagged = float((flags & (visits > 0)).sum()) / visited
        evidence = self._windows.evidence or self._evidence()
        rate = evidence.noise_rate if self.table.voting else flagged
        low, high = min(rate, evidence.contradicted_surest), max(rate, evidence.contradicted)
        low_error, high_error = (2 * math.sqrt(share * (1 - share) / visited) for share in (low, high))
        interval = max(0.0, low - low_error), min(1.0, high + high_error)
        return Judgement(flags, classes, rate, interval, self._doubts(flagged, float(visits.sum()) / visited))

    def _doubts(self, flagged: float, epochs: float) -> list[str]:
        """For this share of flags, after this many epochs."""
        gate, evidence = self._windows.gate, self._windows.evidence
        if self.table.voting:
            if gate.setting != "auto":
                return [f"the noise table does not act: onset={gate.setting!r}"]
            return ["the noise table does not act yet: the run shows no sign that the network memorises labels"]
        found = []
        if (gate.opened or 0) > _LATE * epochs:
            since = f"epoch {gate.opened} of {epochs:.3g}"
            found.append(f"the noise table acts since {since}: its rows have had too few visits")
        limit = _AMBIGUOUS_IF_FEW if flagged < _FEW_WRONG else _AMBIGUOUS
        if evidence is not None and evidence.ambiguous > limit * evidence.contradicted:
            found.append(
                f"when the noise table began to act, the network contradicted {evidence.contradicted:.1%} of the "
                f"labels, and it was undecided about {evidence.ambiguous:.1%}: many of the flags may be mistakes of "
                f"the network"
            )
        return found

    def _evidence(self) -> Evidence:
        """What the rows say now."""
        self._flush()
        counts = self.table.evidence()
        return weigh(counts if self.exchange is None else self.exchange.sum(counts))

    def _flagged(self, labels: Tensor | None) -> tuple[Tensor, Tensor]:
        """Whether each label is flagged, and in favour of which class, (N,) each.

        v^2 must exceed 0.01: in the variant `paper`, u alone reaches 1 on hard clean samples.
        """
        if labels is not None:
            check_labels(labels, self.table)
            labels = labels.to(self.table.u.device, torch.int64)[self.table.first :: self.table.stride]
        self._flush()
        if self.table.voting:
            flagged, class_ = self.table.votes()
        else:
            square, class_ = self.table.strongest(labels)
            flagged = square > (1 - self.table.u.square()).clamp_min(ACTIVE)
        visited = self.table.visits > 0
        fit = self._gather(self.table.mean_fit.where(visited, 0)).double()
        typical = fit.sum() / self.visited().sum().clamp_min(1)
        clear = (self.table.mean_fit - self.table.mean_margin).double() >= typical
        return self._gather(flagged & clear & visited), self._gather(class_)

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
