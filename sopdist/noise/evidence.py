"""What the rows say about the labels as a whole: how often a label is contradicted, by how sure the network is.

The *confidence* of a row is the mean probability of the class that its visits favoured, be it the label or another one.
Where labels are wrong whatever the image shows, sure predictions are contradicted as often as unsure ones. Where labels
are correct, the network contradicts them by mistake, and mistakes are unsure: sure predictions are hardly ever
contradicted.

The counts are integers in bins of confidence, so they depend neither on the order of the rows nor on the number of
ranks. This file knows no tables.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BINS = 4096
SURE = 0.5  # share of the rows whose confidence decides
TOLERANCE = 0.05  # rows whose confidence is less by up to this share are as sure
CLEAN = 0.04  # labels look clean if a smaller share of sure predictions is contradicted


@dataclass(frozen=True)
class Evidence:
    """Summary of all rows that were visited."""

    confidence: float  # at which a row counts as sure
    contradicted: float  # share of all rows
    contradicted_sure: float  # share of the sure rows

    @property
    def looks_clean(self) -> bool:
        """Whether what the network is sure of hardly ever contradicts a label."""
        return self.contradicted_sure < CLEAN


def count(confidence: Tensor, contradicted: Tensor, visited: Tensor) -> Tensor:
    """Numbers of rows by confidence, (2, BINS) int64: not contradicted, and contradicted."""
    bins = (confidence.clamp(0, 1) * (BINS - 1)).to(torch.int64) + BINS * contradicted.to(torch.int64)
    return torch.bincount(bins[visited], minlength=2 * BINS).view(2, BINS)


def weigh(counts: Tensor) -> Evidence:
    """Judge the counts of all ranks together."""
    total, wrong = (column.flip(0).cumsum(0) for column in (counts.sum(dim=0), counts[1]))  # from the surest down
    rows = int(total[-1])
    if not rows:
        return Evidence(0.0, 0.0, 0.0)
    reached = BINS - 1 - int((total < SURE * rows).sum())  # the bin of the least sure of the surest half
    threshold = int(reached * (1 - TOLERANCE))
    last = BINS - 1 - threshold
    return Evidence(threshold / (BINS - 1), int(wrong[-1]) / rows, int(wrong[last]) / int(total[last]))
