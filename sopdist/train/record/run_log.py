"""The logs of a run, written by rank 0: `metrics.jsonl`, a progress bar, W&B, and a summary at the end.

It receives metrics that are already reduced, and does not know about ranks or devices. A disk or W&B error never stops
a run that has started.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ...cli.output import progress_bar
from ...errors import DataError
from ...files import write_atomic
from ..settings import LogSettings
from .metrics_file import MetricsFile, plain, read_lines
from .run_folder import METRICS, SUMMARY_CSV, SUMMARY_JSON
from .wandb_run import WandbRun

_FINAL_METRICS = (
    "loss", "accuracy", "clean_accuracy", "memorised", "samples_per_second",
    "noise/rate", "noise/auroc", "noise/flag_precision", "noise/flag_recall", "noise/corrected_accuracy",
)  # printed at the end  # fmt: skip

_logger = logging.getLogger("sopdist.train")


class RunLog:
    """The logs of one run. Call `rewind` to resume a run.

    Until `finish` is called, the summary says "running". If it still says so when no process is left, the run was
    killed.
    """

    def __init__(
        self,
        folder: Path,
        settings: LogSettings,
        config_tree: Mapping[str, Any],
        total_steps: int,
        name: str,
        class_names: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self._name, self._total_steps, self._class_names = name, total_steps, class_names
        self._bar: tqdm[Any] | None = None
        self._file = MetricsFile(folder / METRICS)
        if not self._write_summary({"name": name, "finished": False, "exit": "running"}):
            raise DataError(f"{folder}: cannot be written; choose another folder with run.folder=...")
        self._wandb = WandbRun(folder, settings, config_tree, name)

    def rewind(self, step: int) -> None:
        """Continue after this step. Lines of later steps are dropped, so that none is written twice."""
        self._file.rewind(step)
        self._close_bar()
        self._open_bar(step)

    def log(self, kind: str, step: int, epoch: int, metrics: Mapping[str, Any]) -> None:
        """Log metrics at a step (the number of completed steps); `kind` is train, eval, noise, ..."""
        values = plain(metrics)
        head = {"kind": kind, "step": step, "epoch": epoch, "time": round(time.time(), 3)}
        self._file.add(head | values | head)
        self._wandb.log(kind, step, epoch, values, self._class_names)
        if kind == "train":
            bar = self._bar or self._open_bar(0)
            bar.set_postfix_str(_bar_text(values), refresh=False)
        self.advance(step)

    def sync(self) -> None:
        """Flush the metrics to disk (fsync), before a checkpoint refers to them."""
        self._file.sync()

    def advance(self, step: int) -> None:
        """Move the progress bar to this step. Cheap enough to call at every step."""
        bar = self._bar or self._open_bar(0)
        bar.update(step - bar.n)

    def finish(self, summary: Mapping[str, Any], *, finished: bool) -> bool:
        """Write `summary.json` and `summary.csv`, close the logs, print the results. Return whether both were written.

        `summary["exit"]` says why an unfinished run has stopped.
        """
        self._close_bar()
        final = {"name": self._name, "finished": finished, "exit": "finished" if finished else "stopped"}
        final |= plain(summary)
        rows = self.rows()
        if rows:
            final["last"] = rows[-1]
        # The exit status is written last: a reader who finds "finished" can rely on all other files.
        written = all([self._write(SUMMARY_CSV, _csv(rows)), self._write_summary(final)])
        scalars = {key: value for key, value in final.items() if not isinstance(value, Mapping)}
        self._wandb.finish(scalars, finished=finished)
        if finished and written:
            print(_final_table(self.folder, rows), flush=True)
        return written

    def rows(self) -> list[dict[str, Any]]:
        """One row per evaluation so far; see `summary_rows`."""
        try:
            return summary_rows(list(read_lines(self.folder / METRICS)))
        except OSError as error:
            _logger.warning("%s: cannot be read: %s", self.folder / METRICS, error.strerror or error)
            return []

    def _write_summary(self, summary: Mapping[str, Any]) -> bool:
        return self._write(SUMMARY_JSON, json.dumps(plain(summary), indent=1, allow_nan=False) + "\n")

    def _write(self, name: str, text: str) -> bool:
        try:
            write_atomic(self.folder / name, text.encode(errors="replace"))
        except OSError as error:
            _logger.warning("%s: cannot be written: %s", self.folder / name, error.strerror or error)
            return False
        return True

    def _open_bar(self, start: int) -> tqdm[Any]:
        layout = "{desc} {percentage:3.0f}%|{bar:20}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
        self._bar = progress_bar(total=self._total_steps, initial=start, desc=self._name, bar_format=layout)
        return self._bar

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def summary_rows(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row per step with an evaluation: the latest metrics of training, evaluation and the noise table.

    Training metrics keep their names; the others are `SPLIT/name` and `noise/name`. Metrics per class are omitted.
    """
    rows: dict[int, dict[str, Any]] = {}
    train: Mapping[str, Any] = {}
    for line in lines:
        kind, step = line["kind"], line["step"]
        values = {key: value for key, value in line.items() if key not in ("kind", "step", "epoch", "time")}
        values = {key: value for key, value in values.items() if not isinstance(value, Mapping | list)}
        if kind == "train":
            train = values
        elif kind == "eval":
            rows.setdefault(step, {"epoch": line["epoch"], "step": step, **train})
        if kind in ("eval", "noise") and step in rows:
            rows[step] |= {key if "/" in key else f"{kind}/{key}": value for key, value in values.items()}
    return list(rows.values())


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    columns = list(dict.fromkeys(["epoch", "step", *(key for row in rows for key in row)]))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _bar_text(metrics: Mapping[str, Any]) -> str:
    """`loss 0.53, accuracy 81.2%, 1,204 samples/s, data 3%`, without the metrics that are missing."""
    layouts = {
        "loss": "loss {:.4g}",
        "accuracy": "accuracy {:.1%}",
        "onset": "onset {:.0f}",
        "samples_per_second": "{:,.0f} samples/s",
        "data_share": "data {:.0%}",
    }
    return ", ".join(layouts[key].format(metrics[key]) for key in layouts if metrics.get(key) is not None)


def _final_table(folder: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    """The results of the last evaluation, with the best top-1, and the names of the files with more."""
    lines = [f"{folder} is finished"]
    for key, value in rows[-1].items() if rows else ():
        if isinstance(value, float) and (key in _FINAL_METRICS or key.endswith(("/top1", "/top5"))):
            lines.append(f"  {key:26} {value:>10.5g}" + (_best(rows, key) if key.endswith("/top1") else ""))
    return "\n".join([*lines, f"  more in {SUMMARY_CSV}, {SUMMARY_JSON} and {METRICS} in this folder"])


def _best(rows: Sequence[Mapping[str, Any]], key: str) -> str:
    # The earliest epoch on ties.
    value, negative_epoch = max((row[key], -row["epoch"]) for row in rows if row.get(key) is not None)
    return f"  (best {value:.5g}, epoch {-negative_epoch})"
