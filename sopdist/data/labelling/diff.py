"""Differences between two label sets of a split: the count of every transition. Independent of the file system."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..labels import UNKNOWN, Labels


@dataclass(frozen=True)
class LabelDiff:
    """All transitions that occur, including unchanged labels. Sparse, because a K x K matrix could be too large."""

    samples: int
    unknown: int  # samples left out because one of the two labels is unknown
    sources: NDArray[np.int64]  # (T,) label before
    targets: NDArray[np.int64]  # (T,) label after
    counts: NDArray[np.int64]  # (T,) number of samples

    @property
    def compared(self) -> int:
        """Number of samples with both labels known."""
        return self.samples - self.unknown

    @property
    def differ(self) -> int:
        """Number of samples whose labels differ."""
        return int(self.counts[self.sources != self.targets].sum())

    def per_class(self, classes: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For each label before, (K,) each: its number of samples, and how many of them have another label after."""
        changed = self.counts * (self.sources != self.targets)
        return _sums(self.sources, self.counts, classes), _sums(self.sources, changed, classes)


def compare_labels(before: Labels, after: Labels, classes: int) -> LabelDiff:
    """Count the transitions from labels `before` to labels `after`."""
    known = (before != UNKNOWN) & (after != UNKNOWN)
    codes = before[known].astype(np.int64) * classes + after[known]
    values, counts = np.unique(codes, return_counts=True)
    unknown = len(before) - int(known.sum())
    return LabelDiff(len(before), unknown, values // classes, values % classes, counts.astype(np.int64))


def diff_rows(diff: LabelDiff, classes: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Rows of a CSV file: one per transition that occurs."""
    for source, target, count in zip(diff.sources.tolist(), diff.targets.tolist(), diff.counts.tolist(), strict=True):
        yield {"from": source, "from_name": classes[source], "to": target, "to_name": classes[target], "count": count}


def _sums(groups: NDArray[np.int64], counts: NDArray[np.int64], classes: int) -> NDArray[np.int64]:
    sums = np.zeros(classes, dtype=np.int64)
    np.add.at(sums, groups, counts)
    return sums
