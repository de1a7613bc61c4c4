"""How well wrong labels are found: metrics of noise detection, from arrays over all samples.

It knows scores, flags and labels as plain arrays, not the table that they were read from. What is not defined, such as
a share of nothing, is None and never NaN, so that it can be written as JSON.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def auroc(scores: Array, wrong: Array) -> float | None:
    """Chance that a wrong label has a higher score than a right one, ties counting half; None without both kinds."""
    positives, negatives = _by_threshold(scores, wrong)  # (T,) each
    pairs = int(positives.sum()) * int(negatives.sum())
    if not pairs:
        return None
    below = negatives[::-1].cumsum()[::-1] - negatives  # (T,) right labels with a score that is lower
    return float((positives * (below + negatives / 2)).sum() / pairs)


def average_precision(scores: Array, wrong: Array) -> float | None:
    """Mean precision over the wrong labels, from the highest score down; None if none is wrong.

    Samples with equal scores are found together: no order among them is better than another.
    """
    positives, negatives = _by_threshold(scores, wrong)  # (T,) each
    total = int(positives.sum())
    if not total:
        return None
    found = positives.cumsum()
    precision = found / (found + negatives.cumsum())
    return float((precision * positives).sum() / total)


def noise_report(
    scores: Array, flags: Array, proposed: Array, given: Array, truth: Array | None, visited: Array, classes: int
) -> dict[str, Any]:
    """What is known of the noise in the labels, in total and by given class. All arrays are (N,).

    Labels are -1 where unknown. The estimate is the share of flags among visited samples. With a truth, everything else
    is counted over all samples whose label and truth are known, visited or not: what was never visited was not found.
    """
    labelled = given >= 0
    visited = visited.astype(bool) & labelled
    flagged = flags.astype(bool) & visited
    per_class: dict[str, Any] = {"samples": _count(given, labelled, classes).tolist()}
    per_class["rate"] = _shares(_count(given, flagged, classes), _count(given, visited, classes))
    report: dict[str, Any] = {
        "rate": _share(flagged.sum(), visited.sum()),
        "flagged": int(flagged.sum()),
        "visited": int(visited.sum()),
    }
    known = labelled & (truth >= 0) if truth is not None else np.zeros_like(labelled)
    if truth is not None and known.any():
        wrong = known & (given != truth)
        found = wrong & flagged
        report |= {
            "true_rate": _share(wrong.sum(), known.sum()),
            "auroc": auroc(scores[known], wrong[known]),
            "average_precision": average_precision(scores[known], wrong[known]),
            "flag_precision": _share(found.sum(), (flagged & known).sum()),
            "flag_recall": _share(found.sum(), wrong.sum()),
            "given_accuracy": _share((given == truth)[known].sum(), known.sum()),
            "corrected_accuracy": _share((proposed == truth)[known].sum(), known.sum()),
        }
        per_class["true_rate"] = _shares(_count(given, wrong, classes), _count(given, known, classes))
    return report | {"per_class": per_class}


def _by_threshold(scores: Array, wrong: Array) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """How many wrong and how many right labels have each distinct score, from the highest down. NaN is no evidence."""
    evidence = np.where(np.isnan(scores), -np.inf, scores)
    distinct, place = np.unique(evidence, return_inverse=True)
    wrong = wrong.astype(bool)
    counts = (np.bincount(place[kind], minlength=len(distinct))[::-1] for kind in (wrong, ~wrong))
    positives, negatives = (count.astype(np.int64) for count in counts)
    return positives, negatives


def _count(given: Array, which: Array, classes: int) -> NDArray[np.int64]:
    """Samples of each given class, (classes,)."""
    return np.bincount(given[which], minlength=classes).astype(np.int64)


def _shares(parts: Array, wholes: Array) -> list[float | None]:
    return [_share(part, whole) for part, whole in zip(parts, wholes, strict=True)]


def _share(part: Any, whole: Any) -> float | None:
    return float(part / whole) if whole else None
