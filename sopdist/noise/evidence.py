"""What the rows say about the labels as a whole: how often labels are contradicted, and how sure the network is of it.

The *confidence* of a row is the mean probability of the class that its visits favoured, be it the label or another one.
Where labels are wrong whatever the image shows, sure predictions are contradicted as often as unsure ones. Where labels
are correct, the network contradicts them by mistake, and mistakes are unsure: sure predictions are hardly ever
contradicted.

A row is *ambiguous* if its visits hardly decided between the label and another class. A network that can tell wrong
labels from its own mistakes has few of these: fewer than labels that it contradicts.

The counts are integers, so they depend neither on the order of the rows nor on the number of ranks. This file knows no
tables.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BINS = 4096
SURE, SUREST = 0.5, 0.1  # shares of the rows: those with the highest confidence
TOLERANCE = 0.05  # rows whose confidence is less by up to this share are as sure
CLEAN = 0.06  # labels look clean if a smaller share of sure predictions is contradicted
DECIDED = 0.25  # |p_y - p_k| / (p_y + p_k) below which a row is ambiguous


class Evidence(NamedTuple):
    """Summary of all rows that were visited."""

    confidence: float  # at which a row counts as sure
    contradicted: float  # share of all rows
    contradicted_sure: float  # share of the sure rows
    contradicted_surest: float  # share of the surest rows
    ambiguous: float  # share of all rows

    @property
    def looks_clean(self) -> bool:
        """Whether what the network is sure of hardly ever contradicts a label."""
        return self.contradicted_sure < CLEAN

    @property
    def noise_rate(self) -> float:
        """Estimated fraction of wrong labels, from how often sure and less sure predictions are contradicted.

        Labels that are wrong whatever the image shows contradict the surest predictions just as often. Mistakes of the
        network are the less frequent, the surer it is. The coefficients were fitted on 40 runs of `sopdist bench
        regimes` and similar ones. If most contradicted rows are ambiguous, classes are confused, and only the sure half
        says something.
        """
        if self.ambiguous > self.contradicted:
            return self.contradicted_sure
        sure, surest = self.contradicted_sure, self.contradicted_surest
        rate = 0.85 * surest + 1.75 * (sure - surest) - 0.2 * (self.contradicted - sure)
        return min(max(rate, 0.0), self.contradicted)

    @property
    def least_confidence(self) -> float:
        """Of the rows that start with a noise term: if labels look clean, only those that the network is sure of."""
        return self.confidence if self.looks_clean else 0.0


def count(fit: Tensor, margin: Tensor, visited: Tensor) -> Tensor:
    """Numbers of rows by confidence, not contradicted and contradicted, and of ambiguous rows: (2 BINS + 1,) int64.

    `fit` and `margin` (R,) are the means of p_y and of p_y minus the largest other p; `visited` (R,) is a mask.
    """
    fit, margin = fit[visited], margin[visited]
    confidence = fit - margin.clamp_max(0)
    bins = (confidence.clamp(0, 1) * (BINS - 1)).to(torch.int64) + BINS * (margin < 0).to(torch.int64)
    ambiguous = (margin.abs() < DECIDED * (2 * fit - margin)).sum()
    return torch.cat([torch.bincount(bins, minlength=2 * BINS), ambiguous[None]])


def weigh(counts: Tensor) -> Evidence:
    """Judge the counts of all ranks together."""
    by_confidence, ambiguous = counts[:-1].view(2, BINS), int(counts[-1])
    total, wrong = (c.flip(0).cumsum(0) for c in (by_confidence.sum(dim=0), by_confidence[1]))  # from the surest down
    rows = int(total[-1])
    if not rows:
        return Evidence(*[0.0] * len(Evidence._fields))

    def top(share: float) -> tuple[float, float]:
        """The confidence of this share of the rows, at least, and how many of them are contradicted."""
        reached = BINS - 1 - int((total < share * rows).sum())  # the bin of the least sure of them
        threshold = int(reached * (1 - TOLERANCE))
        last = BINS - 1 - threshold
        return threshold / (BINS - 1), int(wrong[last]) / int(total[last])

    return Evidence(top(SURE)[0], int(wrong[-1]) / rows, top(SURE)[1], top(SUREST)[1], ambiguous / rows)
