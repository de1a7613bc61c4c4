"""How well wrong labels are found: metrics of label noise detection, from arrays over all samples.

Undefined values, such as a share of nothing, are None and never NaN, so that they can be written as JSON.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...methods import Readout

Array = NDArray[Any]


def auroc(scores: Array, wrong: Array) -> float | None:
    """Probability that a wrong label scores higher than a right one, ties counting half; None without both kinds."""
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


def noise_metrics(readout: Readout, given: Array, clean: Array | None, classes: int) -> dict[str, Any]:
    """Estimated noise, in total and by given class. Given and clean labels are (N,), -1 where unknown.

    The estimate is the method's own, if it has one; otherwise, and by class, it is the share of flags among visited
    samples. With clean labels, everything else is counted over all samples with a known given and clean label, visited
    or not: a wrong label that was never visited was not found.
    """
    labelled = given >= 0
    visited = readout.visited.astype(bool) & labelled
    flagged = readout.flags.astype(bool) & visited
    scores = readout.scores
    per_class: dict[str, Any] = {"samples": _count(given, labelled, classes).tolist()}
    per_class["rate"] = _shares(_count(given, flagged, classes), _count(given, visited, classes))
    low, high = readout.interval or (None, None)
    report: dict[str, Any] = {
        "rate": _share(flagged.sum(), visited.sum()) if readout.rate is None else readout.rate,
        "rate_low": low,
        "rate_high": high,
        "provisional": int(bool(readout.doubts)),
        "flagged": int(flagged.sum()),
        "visited": int(visited.sum()),
    }
    known = labelled & (clean >= 0) if clean is not None else np.zeros_like(labelled)
    if clean is not None and known.any():
        wrong = known & (given != clean)
        found = wrong & flagged
        report |= {
            "true_rate": _share(wrong.sum(), known.sum()),
            "auroc": auroc(scores[known], wrong[known]),
            "average_precision": average_precision(scores[known], wrong[known]),
            "flag_precision": _share(found.sum(), (flagged & known).sum()),
            "flag_recall": _share(found.sum(), wrong.sum()),
            "given_accuracy": _share((given == clean)[known].sum(), known.sum()),
            "corrected_accuracy": _share((readout.proposed == clean)[known].sum(), known.sum()),
        }
        per_class["true_rate"] = _shares(_count(given, wrong, classes), _count(given, known, classes))
    return report | {"per_class": per_class}


def _by_threshold(scores: Array, wrong: Array) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """How many wrong and right labels have each distinct score, from the highest down. NaN counts as -inf."""
    evidence = np.where(np.isnan(scores), -np.inf, scores)
    distinct, position = np.unique(evidence, return_inverse=True)
    wrong = wrong.astype(bool)
    counts = (np.bincount(position[kind], minlength=len(distinct))[::-1] for kind in (wrong, ~wrong))
    positives, negatives = (count.astype(np.int64) for count in counts)
    return positives, negatives


def _count(given: Array, which: Array, classes: int) -> NDArray[np.int64]:
    """Samples of each given class, (classes,)."""
    return np.bincount(given[which], minlength=classes).astype(np.int64)


def _shares(parts: Array, wholes: Array) -> list[float | None]:
    return [_share(part, whole) for part, whole in zip(parts, wholes, strict=True)]


def _share(part: Any, whole: Any) -> float | None:
    return float(part / whole) if whole else None
