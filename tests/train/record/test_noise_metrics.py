"""Metrics of noise detection, against scikit-learn and brute force."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, roc_auc_score

from sopdist.methods import Readout
from sopdist.train.record.noise_metrics import auroc, average_precision, noise_metrics

_SAMPLES = st.lists(
    st.tuples(st.one_of(st.integers(-3, 3).map(float), st.floats(-5, 5), st.just(-np.inf)), st.booleans()),
    min_size=1,
    max_size=30,
)


@given(_SAMPLES)
def test_auroc_and_average_precision_equal_those_of_scikit_learn(samples: list[tuple[float, bool]]) -> None:
    scores = np.array([score for score, _ in samples])
    wrong = np.array([kind for _, kind in samples])
    finite = np.where(np.isinf(scores), -100.0, scores)  # scikit-learn rejects infinity; this ranks last, too
    if wrong.any() and not wrong.all():
        assert auroc(scores, wrong) == pytest.approx(roc_auc_score(wrong, finite), abs=1e-12)
    else:
        assert auroc(scores, wrong) is None
    if wrong.any():
        assert average_precision(scores, wrong) == pytest.approx(average_precision_score(wrong, finite), abs=1e-12)
    else:
        assert average_precision(scores, wrong) is None


@given(_SAMPLES)
def test_auroc_is_the_share_of_pairs_in_the_right_order(samples: list[tuple[float, bool]]) -> None:
    pairs = [(a > b) + (a == b) / 2 for a, wrong in samples if wrong for b, other in samples if not other]
    scores, wrong = np.array([score for score, _ in samples]), np.array([kind for _, kind in samples])
    assert auroc(scores, wrong) == (pytest.approx(np.mean(pairs), abs=1e-12) if pairs else None)


def test_a_score_that_is_not_a_number_ranks_last() -> None:
    scores, wrong = np.array([np.nan, 1.0, -5.0]), np.array([True, False, False])
    assert auroc(scores, wrong) == 0
    assert average_precision(scores, wrong) == pytest.approx(1 / 3)


def example(**changes: Any) -> dict[str, Any]:
    """Eight samples of three classes. 2 and 5 are wrong, 2 and 4 are flagged, 6 was never visited, 7 has no label."""
    columns = {
        "scores": [0.1, 0.2, 3.0, 0.1, 2.0, 0.5, -np.inf, -np.inf],
        "flags": [0, 0, 1, 0, 1, 0, 1, 0],
        "proposed": [0, 0, 1, 1, 2, 1, 0, 0],
        "given": [0, 0, 0, 1, 1, 1, 0, -1],
        "clean": [0, 0, 1, 1, 1, 2, -1, 0],
        "visited": [1, 1, 1, 1, 1, 1, 0, 0],
    }
    arrays: dict[str, Any] = {name: np.array(column) for name, column in columns.items()}
    arrays |= changes
    given, clean = arrays.pop("given"), arrays.pop("clean")
    return noise_metrics(Readout(**arrays), given, clean, 3)


def test_with_clean_labels_the_report_measures_detection() -> None:
    report = example()
    assert report["rate"] == pytest.approx(2 / 6)
    assert (report["flagged"], report["visited"]) == (2, 6)
    assert report["true_rate"] == pytest.approx(2 / 6)
    assert report["auroc"] == pytest.approx((4 + 3) / 8)
    assert report["average_precision"] == pytest.approx((1 + 2 / 3) / 2)
    assert report["flag_precision"] == report["flag_recall"] == 0.5
    assert report["given_accuracy"] == pytest.approx(4 / 6)
    assert report["corrected_accuracy"] == pytest.approx(4 / 6)  # one label corrected, one made wrong
    assert report["per_class"] == {
        "samples": [4, 3, 0], "rate": [pytest.approx(1 / 3), pytest.approx(1 / 3), None],
        "true_rate": [pytest.approx(1 / 3), pytest.approx(1 / 3), None],
    }  # fmt: skip


@pytest.mark.parametrize("clean", [None, np.full(8, -1)])
def test_without_clean_labels_the_report_has_only_estimates(clean: Any) -> None:
    report = example(clean=clean)
    assert report.keys() == {"rate", "rate_low", "rate_high", "provisional", "flagged", "visited", "per_class"}
    assert report["rate"] == pytest.approx(2 / 6)
    assert report["per_class"].keys() == {"samples", "rate"}


def test_a_wrong_label_that_was_never_visited_counts_as_not_found() -> None:
    report = example(clean=np.array([0, 0, 1, 1, 1, 1, 2, 0]))
    assert report["flag_recall"] == 0.5, "sample 6 is wrong, and its flag does not count"
    assert report["auroc"] == pytest.approx(5 / 10), "sample 2 is first, sample 6 last"


@pytest.mark.parametrize(
    "changes", [{}, {"visited": np.zeros(8)}, {"clean": np.zeros(8, int)}, {"given": -np.ones(8, int)}]
)
def test_the_report_is_always_valid_json(changes: Any) -> None:
    text = json.dumps(example(**changes), allow_nan=False)
    assert json.loads(text)["rate"] in (None, pytest.approx(2 / 6))


def test_the_methods_own_estimate_is_reported_with_its_interval_and_doubts() -> None:
    flags = np.array([True, False, False, False])
    scores, labels = np.zeros(4, np.float32), np.zeros(4, np.int64)
    visited = np.ones(4, bool)
    readout = Readout(scores, flags, labels, visited, rate=0.1, interval=(0.05, 0.3), doubts=("too early",))
    report = noise_metrics(readout, labels, None, 2)
    assert (report["rate"], report["rate_low"], report["rate_high"], report["provisional"]) == (0.1, 0.05, 0.3, 1)
    assert report["per_class"]["rate"] == [0.25, None]
    plain = noise_metrics(Readout(scores, flags, labels, visited), labels, None, 2)
    assert (plain["rate"], plain["rate_low"], plain["provisional"]) == (0.25, None, 0)
