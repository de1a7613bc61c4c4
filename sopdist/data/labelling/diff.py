"""How two label sets of a split differ: how often each label became which other. Nothing here reads or writes files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..labels import UNKNOWN, Labels

MOST_CLASSES = 20  # of a matrix that a person can still read
MOST_LINES = 20


@dataclass(frozen=True)
class LabelDiff:
    """All transitions that occur, equal ones included; K x K could be too large to hold."""

    samples: int
    unknown: int  # samples left out because one of the two labels is unknown
    sources: NDArray[np.int64]  # (T,) the label before
    targets: NDArray[np.int64]  # (T,) the label after
    counts: NDArray[np.int64]  # (T,) how often

    @property
    def compared(self) -> int:
        """Samples with both labels known."""
        return self.samples - self.unknown

    @property
    def differ(self) -> int:
        """Samples with two different labels."""
        return int(self.counts[self.sources != self.targets].sum())

    def per_class(self, classes: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For each label before: its samples, and how many of them have another label after."""
        changed = self.counts * (self.sources != self.targets)
        return _sums(self.sources, self.counts, classes), _sums(self.sources, changed, classes)


def compare_labels(before: Labels, after: Labels, classes: int) -> LabelDiff:
    """Count the transitions from one labelling to another."""
    known = (before != UNKNOWN) & (after != UNKNOWN)
    codes = before[known].astype(np.int64) * classes + after[known]
    values, counts = np.unique(codes, return_counts=True)
    unknown = len(before) - int(known.sum())
    return LabelDiff(len(before), unknown, values // classes, values % classes, counts.astype(np.int64))


def diff_text(diff: LabelDiff, names: tuple[str, str], classes: Sequence[str]) -> str:
    """The comparison for a person: a matrix for few classes, the heaviest transitions for many."""
    share = f" ({diff.differ / diff.compared:.2%})" if diff.compared else ""
    lines = [f"{names[0]} -> {names[1]}: {diff.differ:,} of {diff.compared:,} labels differ{share}"]
    if diff.unknown:
        lines.append(f"{diff.unknown:,} samples are left out: unknown in one of the two")
    if diff.compared:
        lines += ["", *(_matrix(diff, classes) if len(classes) <= MOST_CLASSES else _heaviest(diff, classes))]
    return "\n".join(lines)


def diff_rows(diff: LabelDiff, classes: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Every transition that occurs, for a file."""
    for source, target, count in zip(diff.sources.tolist(), diff.targets.tolist(), diff.counts.tolist(), strict=True):
        yield {"from": source, "from_name": classes[source], "to": target, "to_name": classes[target], "count": count}


def align(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """Lines of aligned columns: those in `left` to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if place in left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def class_title(number: int, classes: Sequence[str], width: int = 24) -> str:
    """`3 cat`, and just `3` if the class is named so; cut to `width`."""
    name = classes[number]
    title = name if name == str(number) else f"{number} {name}"
    return title if len(title) <= width else title[: width - 3] + "..."


def _matrix(diff: LabelDiff, classes: Sequence[str]) -> list[str]:
    matrix = np.zeros((len(classes), len(classes)), dtype=np.int64)
    matrix[diff.sources, diff.targets] = diff.counts
    samples, differ = diff.per_class(len(classes))
    rows = [["from \\ to", *map(str, range(len(classes))), "samples", "differ", "share"]]
    for k in range(len(classes)):
        counts = [f"{count}" if count else "." for count in matrix[k].tolist()]
        rows.append([class_title(k, classes), *counts, *_share(int(differ[k]), int(samples[k]))])
    return align(rows)


def _heaviest(diff: LabelDiff, classes: Sequence[str]) -> list[str]:
    samples, differ = diff.per_class(len(classes))
    order = np.argsort(-differ, kind="stable")
    order = order[differ[order] > 0]
    if not len(order):
        return ["no label differs"]
    rows = [["from", "samples", "differ", "share"]]
    rows += [[class_title(k, classes), *_share(int(differ[k]), int(samples[k]))] for k in order[:MOST_LINES].tolist()]
    lines = [f"classes with the most differences ({len(rows) - 1} of {len(order):,}):", *align(rows), ""]
    apart = np.flatnonzero(diff.sources != diff.targets)
    apart = apart[np.argsort(-diff.counts[apart], kind="stable")]
    rows = [["from", "to", "count"]]
    for place in apart[:MOST_LINES].tolist():
        source, target = int(diff.sources[place]), int(diff.targets[place])
        rows.append([class_title(source, classes), class_title(target, classes), f"{diff.counts[place]:,}"])
    return [*lines, f"most frequent transitions ({len(rows) - 1} of {len(apart):,}):", *align(rows, left=(0, 1))]


def _share(differ: int, samples: int) -> list[str]:
    return [f"{samples:,}", f"{differ:,}", f"{differ / samples:.1%}" if samples else "-"]


def _sums(groups: NDArray[np.int64], counts: NDArray[np.int64], classes: int) -> NDArray[np.int64]:
    sums = np.zeros(classes, dtype=np.int64)
    np.add.at(sums, groups, counts)
    return sums
