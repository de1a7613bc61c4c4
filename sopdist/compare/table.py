"""The table of a comparison: as text for the terminal, as Markdown, as CSV, and with all results as JSON."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from .. import __version__
from ..cli.output import write_json, write_output
from ..cli.tables import format_table, markdown
from ..cli.units import pluralize
from ..train.evaluate import data_of_split
from ..train.record.exit_status import FINISHED
from .label_sets import facts_of
from .plan import Comparison
from .record import settings_of
from .results import Mean, Results, Row

MARKDOWN, CSV, JSON = "table.md", "table.csv", "results.json"
_NONE = "-"  # a value that does not exist


def write_tables(comparison: Comparison, found: Sequence[Results]) -> None:
    """Write table.md, table.csv and results.json."""
    parts = [f"# Comparison of {', '.join(entry.text for entry in comparison.entries)}"]
    for results in found:
        parts += [f"## {heading(results)}", markdown(header(results), _cells(results)), winner_text(results)]
    parts.append("\n".join(f"- {note}" for note in notes(comparison, found)))
    write_output(comparison.out / MARKDOWN, ("\n\n".join(parts) + "\n").encode())
    write_output(comparison.out / CSV, _csv(found).encode())
    write_json(comparison.out / JSON, _json(comparison, found))


def as_text(comparison: Comparison, found: Sequence[Results]) -> str:
    """The table for the terminal."""
    parts = []
    for results in found:
        parts += [f"{heading(results)}\n\n{format_table(header(results), _cells(results))}", winner_text(results)]
    return "\n\n".join([*parts, "\n".join(f"- {note}" for note in notes(comparison, found))])


def heading(results: Results) -> str:
    """The label set, and how many of its labels are wrong."""
    wrong = "" if results.wrong is None else f" ({results.wrong:.1%} of the training labels are wrong)"
    return f"label set {results.labels}{wrong}"


def header(results: Results) -> list[str]:
    """The columns."""
    first = results.rows[0].entry.text
    validation = "validation" if results.validation is None else results.validation.split
    return [
        "method", "seeds", "last epoch", "best epoch (not selectable)", f"minus {first}",
        f"time / {results.reference.text}", "bytes/sample", "AUROC", "noise rate", validation,
    ]  # fmt: skip


def winner_text(results: Results) -> str:
    """Which method noisy validation labels choose, or why none."""
    validation = results.validation
    if validation is None:
        return (
            "No winner: the config has no validation split besides the test split. Hold one out with "
            "`sopdist prepare --val`, and name it: 'evaluate.splits={val: val, test: test}'."
        )
    wrong = results.validation_wrong
    share = "share of wrong labels unknown" if wrong is None else f"{wrong:.1%} wrong"
    where = f"{validation.split}, label set {validation.labels} ({share})"
    if not results.validation_is_noisy:
        return (
            f"No winner: the labels of {where} are clean, and clean labels must not choose a method. Add a "
            f"label set {results.labels} to that split, with the noise of the training labels."
        )
    if not results.winners:
        return "No winner yet: some runs are not finished."
    names = " and ".join(f"{entry.text} (*)" for entry in results.winners)
    return f"Winner by noisy validation: {names}, after the last epoch on {where}."


def notes(comparison: Comparison, found: Sequence[Results]) -> list[str]:
    """What the columns mean, what was not equal, and which runs are missing."""
    config, test = comparison.config, comparison.test
    labels = config.evaluate.labels_of(test)
    wrong = facts_of(data_of_split(config.data, config.evaluate.splits[test]), labels).wrong
    quality = f", {wrong:.1%} of them WRONG: accuracies are too low" if wrong else ""
    seeds = comparison.request.seeds
    over = f"mean ± standard error over the seeds {', '.join(map(str, seeds))}"
    lines = [
        f"Accuracy in percent on split {test} (label set {labels}{quality}): "
        f"{over if len(seeds) > 1 else f'seed {seeds[0]}; a single seed has no standard error'}. "
        "Seeds change weights, order and augmentation, not the label noise.",
        "Best epoch: not selectable, because it was found with the test labels.",
        f"Minus {comparison.entries[0].text}: difference in points, paired by seed.",
        _time_note(found),
        "Bytes/sample: memory of the sample tables. AUROC: how well the method ranks wrong labels. Noise rate: the "
        f"method's estimate. {_NONE}: the method does not report it, or clean labels are not known.",
    ]
    lines += _different_settings(comparison)
    lines += [f"{entry.text}: {cost.outlook}" for entry, cost in comparison.costs.items() if cost.outlook]
    for results in found:
        for row in results.rows:
            for result in row.runs:
                if result.status != FINISHED:
                    lines.append(f"MISSING: run {result.run.name}: {result.status}")
    return lines


def _time_note(found: Sequence[Results]) -> str:
    reference = found[0].reference
    seconds = [row.seconds for results in found for row in results.rows if row.entry == reference and row.seconds]
    shown = f" ({', '.join(f'{value:.3g} s' for value in seconds)})" if seconds else ""
    return (
        f"Time: seconds of training without startup and evaluation, median over seeds, relative to {reference.text}"
        f"{shown}. Compare only runs on the same machine."
    )


def _different_settings(comparison: Comparison) -> list[str]:
    """Settings outside the section `method` that are not the same for all entries."""
    settings = {entry: settings_of(config) for entry, config in comparison.configs.items()}
    keys = dict.fromkeys(key for values in settings.values() for key in values if not key.startswith("method."))
    lines = []
    for key in keys:
        users: dict[str, list[str]] = {}
        for entry, values in settings.items():
            users.setdefault(str(values.get(key)), []).append(entry.text)
        if len(users) > 1:
            shown = "; ".join(f"{value} for {', '.join(names)}" for value, names in users.items())
            lines.append(f"NOT EQUAL: {key} is {shown}")
    return lines


def _cells(results: Results) -> list[list[str]]:
    return [_row_cells(row, best=row.entry in results.winners) for row in results.rows]


def _row_cells(row: Row, *, best: bool) -> list[str]:
    done, planned = len(row.finished), len(row.runs)
    return [
        row.entry.text,
        str(done) if done == planned else f"{done} of {planned}",
        percent(row.test),
        percent(row.best),
        percent(row.difference, signed=True),
        _NONE if row.relative_time is None else f"{row.relative_time:.2f}",
        f"{row.bytes_per_sample:,}",
        _NONE if row.auroc is None else f"{row.auroc.value:.3f}",
        _NONE if row.rate is None else f"{row.rate.value:.1%}",
        percent(row.validation) + (" *" if best else ""),
    ]


def percent(mean: Mean | None, *, signed: bool = False) -> str:
    """`93.21 ± 0.10`, without the error if there is only one value."""
    if mean is None:
        return _NONE
    value = f"{100 * mean.value:{'+' if signed else ''}.2f}"
    return value if mean.error is None else f"{value} ± {100 * mean.error:.2f}"


def _values(row: Row) -> dict[str, Any]:
    """The numbers of a row, unrounded."""
    values: dict[str, Any] = {"seeds": len(row.finished), "seeds_planned": len(row.runs)}
    for name in ("test", "best", "difference", "auroc", "rate", "validation"):
        mean: Mean | None = getattr(row, name)
        values[name] = None if mean is None else mean.value
        values[f"{name}_error"] = None if mean is None else mean.error
    return values | {
        "seconds": row.seconds,
        "relative_time": row.relative_time,
        "bytes_per_sample": row.bytes_per_sample,
    }


def _csv(found: Sequence[Results]) -> str:
    """One row per label set and entry; cells are empty for values that do not exist."""
    rows = [
        {"label_set": results.labels, "method": row.entry.text, **_values(row), "winner": row.entry in results.winners}
        for results in found
        for row in results.rows
    ]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _json(comparison: Comparison, found: Sequence[Results]) -> dict[str, Any]:
    return {
        "sopdist": __version__,
        "config": comparison.request.config,
        "test": comparison.test,
        "seeds": list(comparison.request.seeds),
        "label_sets": [_results_json(results) for results in found],
        "notes": notes(comparison, found),
    }


def _results_json(results: Results) -> dict[str, Any]:
    return {
        "label_set": results.labels,
        "wrong": results.wrong,
        "validation_split": None if results.validation is None else results.validation.split,
        "validation_labels": None if results.validation is None else results.validation.labels,
        "validation_wrong": results.validation_wrong,
        "winners": [entry.text for entry in results.winners],
        "time_relative_to": results.reference.text,
        "methods": [
            {
                "method": row.entry.text,
                **_values(row),
                "runs": [
                    {
                        "run": result.run.name,
                        "seed": result.run.seed,
                        "status": result.status,
                        "epochs": list(result.curve),
                        "test": list(result.curve.values()),
                        "best_epoch": result.best_epoch if result.curve else None,
                        "seconds": result.seconds,
                        "auroc": result.auroc,
                        "rate": result.rate,
                        "validation": result.validation,
                    }
                    for result in row.runs
                ],
            }
            for row in results.rows
        ],
    }


def summary_line(comparison: Comparison, found: Sequence[Results]) -> str:
    """How many runs are finished."""
    runs = [result for results in found for row in results.rows for result in row.runs]
    finished = sum(result.status == FINISHED for result in runs)
    return f"{finished} of {pluralize(len(runs), 'run')} finished; table, curves and results in {comparison.out}"
