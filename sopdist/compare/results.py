"""From the files of the runs to the rows of the table. Only finished runs count.

Accuracies and rates are fractions from 0 to 1. An error is the standard error of the mean over seeds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..train.record.exit_status import FINISHED
from ..train.record.metrics_file import read_lines
from ..train.record.run_folder import METRICS
from .entries import Entry
from .label_sets import facts_of
from .plan import Comparison, Run
from .running import status_of
from .validation import Validation

_BASELINE = "ce"  # training time is relative to this method, if it is compared


@dataclass(frozen=True)
class Mean:
    """A mean over seeds."""

    value: float
    error: float | None  # None for a single value
    count: int


@dataclass(frozen=True)
class RunResult:
    """What a run has recorded; everything but the status is empty if it is not finished."""

    run: Run
    status: str  # as in `running.status_of`
    curve: Mapping[int, float]  # test accuracy after each evaluated epoch; epochs count from 0
    seconds: float | None  # of training: all steps and what the method does between epochs, without evaluation
    auroc: float | None  # of the detection of wrong labels, at the end
    rate: float | None  # the method's estimate of the noise rate, at the end
    validation: float | None  # accuracy on the validation labels after the last epoch

    @property
    def last(self) -> float:
        """Test accuracy after the last epoch."""
        return self.curve[max(self.curve)]

    @property
    def best_epoch(self) -> int:
        """The epoch with the best test accuracy; the earliest of equally good ones."""
        return max(self.curve, key=lambda epoch: (self.curve[epoch], -epoch))


@dataclass(frozen=True)
class Row:
    """An entry on one label set."""

    entry: Entry
    runs: tuple[RunResult, ...]  # of all seeds
    test: Mean | None  # last epoch; None if no run is finished, here and below
    best: Mean | None  # best epoch
    difference: Mean | None  # to the first entry, over the seeds that both have finished; None for the first itself
    seconds: float | None  # of training, median
    relative_time: float | None  # to the reference of `Results`
    bytes_per_sample: int  # of the sample tables
    auroc: Mean | None
    rate: Mean | None
    validation: Mean | None

    @property
    def finished(self) -> list[RunResult]:
        """The runs that count."""
        return [result for result in self.runs if result.status == FINISHED]


@dataclass(frozen=True)
class Results:
    """All entries on one label set."""

    labels: str
    wrong: float | None  # fraction of wrong training labels; None: unknown
    rows: tuple[Row, ...]
    reference: Entry  # that training time is relative to
    validation: Validation | None
    validation_wrong: float | None  # fraction of wrong validation labels; None: unknown

    @property
    def validation_is_noisy(self) -> bool:
        """Whether the validation labels may choose: they are not known to be clean, or the training labels are too."""
        return self.validation is not None and (self.validation_wrong != 0 or self.wrong == 0)

    @property
    def winners(self) -> list[Entry]:
        """The entries with the highest accuracy on noisy validation labels, if all seeds of all entries have one."""
        scores = [(row.entry, row.validation) for row in self.rows]
        if not self.validation_is_noisy or any(
            score is None or score.count < len(row.runs) for (_, score), row in zip(scores, self.rows, strict=True)
        ):
            return []
        best = max(score.value for _, score in scores if score is not None)
        return [entry for entry, score in scores if score is not None and score.value == best]


def collect(comparison: Comparison) -> list[Results]:
    """Read the results of all runs."""
    runs = comparison.runs()
    found = []
    for labels in comparison.label_sets:
        validation = comparison.validations.get(labels.name)
        split = validation.split if validation is not None else ""
        results = {run: read_result(run, comparison.test, split) for run in runs if run.labels == labels.name}
        found.append(_summarize(comparison, labels.name, results))
    return found


def read_result(run: Run, test: str, validation: str) -> RunResult:
    """The result of a run, from its metrics.jsonl; `test` and `validation` are evaluation splits."""
    status = status_of(run)
    if status != FINISHED:
        return RunResult(run, status, {}, None, None, None, None)
    lines = list(read_lines(run.folder / METRICS))
    evaluations = [line for line in lines if line["kind"] == "eval"]
    curve = {line["epoch"]: line[f"{test}/top1"] for line in evaluations}
    noise: dict[str, Any] = next((line for line in reversed(lines) if line["kind"] == "noise"), {})
    accuracy = evaluations[-1].get(f"{validation}/top1")
    return RunResult(run, status, curve, training_seconds(lines), noise.get("auroc"), noise.get("rate"), accuracy)


def training_seconds(lines: Iterable[Mapping[str, Any]]) -> float | None:
    """Seconds of training, from the samples and the samples/s of each line.

    If a run was resumed within the steps of a line, its samples/s covers only the rest of them, and is used for all.
    """
    rates = [(line["samples"], line.get("samples_per_second")) for line in lines if line["kind"] == "train"]
    seconds = [samples / rate for samples, rate in rates if rate]
    return sum(seconds) if seconds else None


def mean_of(values: Iterable[float | None]) -> Mean | None:
    """The mean of the values that are known, with its standard error."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    error = statistics.stdev(known) / math.sqrt(len(known)) if len(known) > 1 else None
    return Mean(statistics.fmean(known), error, len(known))


def _summarize(comparison: Comparison, labels: str, results: Mapping[Run, RunResult]) -> Results:
    by_entry = {
        entry: tuple(result for run, result in results.items() if run.entry == entry) for entry in comparison.entries
    }
    baselines = [entry for entry in comparison.entries if entry.method == _BASELINE]
    reference = (baselines or comparison.entries)[0]
    seconds = {entry: _median(result.seconds for result in found) for entry, found in by_entry.items()}
    rows = []
    for entry, found in by_entry.items():
        finished = [result for result in found if result.status == FINISHED]
        ours, unit = seconds[entry], seconds[reference]
        first = by_entry[comparison.entries[0]]
        rows.append(
            Row(
                entry,
                found,
                test=mean_of(result.last for result in finished),
                best=mean_of(result.curve[result.best_epoch] for result in finished),
                difference=None if entry == comparison.entries[0] else _paired_difference(found, first),
                seconds=ours,
                relative_time=ours / unit if ours is not None and unit else None,
                bytes_per_sample=comparison.costs[entry].bytes_per_sample,
                auroc=mean_of(result.auroc for result in finished),
                rate=mean_of(result.rate for result in finished),
                validation=mean_of(result.validation for result in finished),
            )
        )
    config, validation = comparison.config, comparison.validations.get(labels)
    wrong = facts_of(config.data, labels).wrong
    validation_wrong = None if validation is None else facts_of(validation.data(config), validation.labels).wrong
    return Results(labels, wrong, tuple(rows), reference, validation, validation_wrong)


def _paired_difference(ours: Sequence[RunResult], theirs: Sequence[RunResult]) -> Mean | None:
    """Accuracy minus that of `theirs`, paired by seed."""
    base = {result.run.seed: result.last for result in theirs if result.status == FINISHED}
    own = {result.run.seed: result.last for result in ours if result.status == FINISHED}
    return mean_of(own[seed] - base[seed] for seed in own if seed in base)


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
