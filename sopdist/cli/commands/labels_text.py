"""Text output of `sopdist labels`: class titles, and the comparison of two label sets."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...data.labelling.diff import LabelDiff
from ...data.labels import UNKNOWN
from ..tables import format_table

MAX_MATRIX_CLASSES = 20  # with more classes, a matrix is too wide for a terminal
MAX_ROWS = 20


def class_title(label: int, classes: Sequence[str], width: int = 24) -> str:
    """`3 cat`, or just `3` if that is the name of the class; truncated to `width` characters."""
    name = classes[label]
    title = name if name == str(label) else f"{label} {name}"
    return title if len(title) <= width else title[: width - 3] + "..."


def label_title(label: int, classes: Sequence[str], width: int = 24) -> str:
    """`3 cat`, or `unknown`."""
    return "unknown" if label == UNKNOWN else class_title(label, classes, width)


def diff_text(diff: LabelDiff, names: tuple[str, str], classes: Sequence[str]) -> str:
    """The comparison as text: a transition matrix for few classes, the most frequent transitions for many."""
    rate = f" ({diff.differ / diff.compared:.2%})" if diff.compared else ""
    lines = [f"{names[0]} -> {names[1]}: {diff.differ:,} of {diff.compared:,} labels differ{rate}"]
    if diff.unknown:
        lines.append(f"{diff.unknown:,} samples are left out: unknown in one of the two label sets")
    if diff.compared:
        show = _matrix_text if len(classes) <= MAX_MATRIX_CLASSES else _top_transitions_text
        lines += ["", show(diff, classes)]
    return "\n".join(lines)


def _matrix_text(diff: LabelDiff, classes: Sequence[str]) -> str:
    matrix = np.zeros((len(classes), len(classes)), dtype=np.int64)
    matrix[diff.sources, diff.targets] = diff.counts
    samples, differ = diff.per_class(len(classes))
    rows = []
    for k in range(len(classes)):
        counts = [f"{count}" if count else "." for count in matrix[k].tolist()]
        rows.append([class_title(k, classes), *counts, *_counts_and_rate(int(differ[k]), int(samples[k]))])
    return format_table(["from \\ to", *map(str, range(len(classes))), "samples", "differ", "rate"], rows)


def _top_transitions_text(diff: LabelDiff, classes: Sequence[str]) -> str:
    samples, differ = diff.per_class(len(classes))
    order = np.argsort(-differ, kind="stable")
    order = order[differ[order] > 0]
    if not len(order):
        return "no labels differ"
    of_classes = [
        [class_title(k, classes), *_counts_and_rate(int(differ[k]), int(samples[k]))] for k in order[:MAX_ROWS].tolist()
    ]
    changed = np.flatnonzero(diff.sources != diff.targets)
    changed = changed[np.argsort(-diff.counts[changed], kind="stable")]
    transitions = []
    for i in changed[:MAX_ROWS].tolist():
        source, target = int(diff.sources[i]), int(diff.targets[i])
        transitions.append([class_title(source, classes), class_title(target, classes), f"{diff.counts[i]:,}"])
    return "\n".join([
        f"classes with the most differences ({len(of_classes)} of {len(order):,}):",
        format_table(["from", "samples", "differ", "rate"], of_classes),
        "",
        f"most frequent transitions ({len(transitions)} of {len(changed):,}):",
        format_table(["from", "to", "count"], transitions, left=(0, 1)),
    ])  # fmt: skip


def _counts_and_rate(differ: int, samples: int) -> list[str]:
    return [f"{samples:,}", f"{differ:,}", f"{differ / samples:.1%}" if samples else "-"]
