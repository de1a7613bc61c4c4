"""What two finished runs say, side by side, out of the files that every run leaves behind. Knows no network."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..train.metrics_file import read_lines
from ..train.run_folder import METRICS, SUMMARY_JSON

_ACCURACY = "test/top1"


class Run(NamedTuple):
    """A finished run."""

    last: Mapping[str, Any]  # what was measured at its end
    best: float  # best test accuracy of any epoch
    best_epoch: int  # counted from 0, as in metrics.jsonl
    speed: float  # samples a second, the median of the epochs


def is_finished(folder: Path) -> bool:
    """Whether the summary of a run says so."""
    try:
        return bool(json.loads((folder / SUMMARY_JSON).read_text())["finished"])
    except (OSError, ValueError, KeyError):
        return False


def read_run(folder: Path) -> Run:
    """The end of a run, and its course."""
    last = json.loads((folder / SUMMARY_JSON).read_text())["last"]
    lines = list(read_lines(folder / METRICS))
    evaluations = [(line[_ACCURACY], -line["epoch"]) for line in lines if _ACCURACY in line]
    best, epoch = max(evaluations)  # the earliest, of several that are equally good
    speeds = [line["samples_per_second"] for line in lines if line.get("samples_per_second")]
    return Run(last, best, -epoch, statistics.median(speeds))


def comparison(ce: Run, sop: Run) -> str:
    """A table of both, and what SOP has found out about the labels."""
    rows = [
        ("test accuracy, last epoch", *(_percent(run.last[_ACCURACY]) for run in (ce, sop))),
        ("test accuracy, best epoch", *(f"{_percent(run.best)} (epoch {run.best_epoch})" for run in (ce, sop))),
        ("wrong labels memorised", *(_percent(run.last.get("memorised")) for run in (ce, sop))),
        ("samples/s", *(f"{run.speed:,.0f}" for run in (ce, sop))),
    ]
    table = [("", "CE", "SOP"), *rows]
    lines = [f"{name:26}{first:>18}{second:>18}".rstrip() for name, first, second in table]
    found = {key.removeprefix("noise/"): value for key, value in sop.last.items() if key.startswith("noise/")}
    return "\n".join([*lines, "", *_labels(found)])


def _labels(found: Mapping[str, Any]) -> list[str]:
    """Without wrong labels there is nothing to rank or to find."""
    lines = []
    if found["auroc"] is not None:
        lines = [
            f"SOP ranks wrong labels before right ones with an AUROC of {found['auroc']:.3f}, "
            f"average precision {found['average_precision']:.3f}.",
            f"It flags {found['flagged']} labels: {_percent(found['flag_precision'])} of these are wrong, "
            f"and they are {_percent(found['flag_recall'])} of all wrong ones.",
        ]
    return [
        *lines,
        f"Estimated noise {_percent(found['rate'])}, true {_percent(found['true_rate'])}. "
        f"Labels right as given {_percent(found['given_accuracy'])}, "
        f"as proposed {_percent(found['corrected_accuracy'])}.",
    ]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
