"""Warnings that follow from the metrics of a run."""

from __future__ import annotations

from typing import Any

from sopdist.train.record.run_warnings import accuracy_warnings


def rows(*top1: float, onset: int | None) -> list[dict[str, Any]]:
    found = []
    for epoch, value in enumerate(top1):
        row: dict[str, Any] = {"epoch": epoch, "step": 5 * epoch, "val/top1": value, "loss": 1.0}
        found.append(row | ({"noise/onset": onset} if onset is not None and epoch + 1 >= onset else {}))
    return found


def test_an_accuracy_that_falls_after_the_onset_is_reported() -> None:
    (warning,) = accuracy_warnings(rows(0.5, 0.7, 0.71, 0.65, 0.6, onset=3))
    assert warning.startswith("val/top1 fell from 71.0% to 60.0% after the onset (epoch 3).")


def test_one_that_rises_or_moves_within_the_noise_is_not() -> None:
    assert accuracy_warnings(rows(0.5, 0.7, 0.71, 0.73, onset=2)) == []
    assert accuracy_warnings(rows(0.5, 0.7, 0.71, 0.705, onset=2)) == []


def test_without_an_onset_there_is_nothing_to_compare() -> None:
    assert accuracy_warnings(rows(0.9, 0.5, onset=None)) == []
    assert accuracy_warnings(rows(0.9, 0.5, onset=0)) == []
    assert accuracy_warnings([]) == []
