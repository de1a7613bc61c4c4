"""What is written down of a run, by rank 0: `metrics.jsonl`, a progress bar, W&B, and at the end a summary.

It is handed numbers that are gathered already, and knows neither ranks nor devices. No trouble with a disk or with W&B
ends a run that has begun.
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

from ..data.commands.output import progress_bar
from ..data.errors import DataError
from ..files import write_whole
from .metrics_file import MetricsFile, plain, read_lines
from .run_folder import METRICS, SUMMARY_CSV, SUMMARY_JSON
from .settings import LogSettings
from .wandb_run import WandbRun

_CLOSING = (
    "loss", "accuracy", "clean_accuracy", "memorised", "samples_per_second",
    "noise/rate", "noise/auroc", "noise/flag_precision", "noise/flag_recall", "noise/corrected_accuracy",
)  # what is printed at the end  # fmt: skip

_logger = logging.getLogger("sopdist.train")


class Journal:
    """The record of one run. `rewind` says where a resumed one goes on.

    Until `finish` is called the summary says that the run is running: whoever finds that after its end knows that it
    was killed.
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
            raise DataError(f"{folder}: cannot be written; run.folder=... chooses another place")
        self._wandb = WandbRun(folder, settings, config_tree, name)

    def rewind(self, step: int) -> None:
        """Go on after this step: what was written about later ones is dropped, and so never there twice."""
        self._file.rewind(step)
        self._close_bar()
        self._open_bar(step)

    def log(self, kind: str, step: int, epoch: int, metrics: Mapping[str, Any]) -> None:
        """Write down what was measured at a step (the number of steps done): `kind` is train, eval, noise, ..."""
        numbers = plain(metrics)
        head = {"kind": kind, "step": step, "epoch": epoch, "time": round(time.time(), 3)}
        self._file.add(head | numbers | head)
        self._wandb.log(kind, step, epoch, numbers, self._class_names)
        if kind == "train":
            bar = self._bar or self._open_bar(0)
            bar.set_postfix_str(_bar_text(numbers), refresh=False)
        self.advance(step)

    def sync(self) -> None:
        """Make what was logged survive a power cut: a checkpoint is about to say that it is there."""
        self._file.sync()

    def advance(self, step: int) -> None:
        """Show that so many steps are done; as cheap as it must be to be called at each of them."""
        bar = self._bar or self._open_bar(0)
        bar.update(step - bar.n)

    def finish(self, summary: Mapping[str, Any], *, finished: bool) -> bool:
        """Write `summary.json` and `summary.csv`, close everything, and print how it came out; whether it was written.

        `summary["exit"]` says why a run that is not finished has ended.
        """
        self._close_bar()
        ending = {"name": self._name, "finished": finished, "exit": "finished" if finished else "stopped"}
        ending |= plain(summary)
        rows = self._rows()
        if rows:
            ending["last"] = rows[-1]
        # How it ended comes last: whoever reads "finished" may rely on all the rest.
        written = all([self._write(SUMMARY_CSV, _csv(rows)), self._write_summary(ending)])
        scalars = {key: value for key, value in ending.items() if not isinstance(value, Mapping)}
        self._wandb.finish(scalars, finished=finished)
        if finished and written:
            print(_closing_table(self.folder, rows), flush=True)
        return written

    def _rows(self) -> list[dict[str, Any]]:
        try:
            return summary_rows(list(read_lines(self.folder / METRICS)))
        except OSError as error:
            _logger.warning("%s: cannot be read: %s", self.folder / METRICS, error.strerror or error)
            return []

    def _write_summary(self, summary: Mapping[str, Any]) -> bool:
        return self._write(SUMMARY_JSON, json.dumps(plain(summary), indent=1, allow_nan=False) + "\n")

    def _write(self, name: str, text: str) -> bool:
        try:
            write_whole(self.folder / name, text.encode(errors="replace"))
        except OSError as error:
            _logger.warning("%s: CANNOT BE WRITTEN: %s", self.folder / name, error.strerror or error)
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
    """A row for each step with an evaluation: the latest training metrics, the evaluation's, and the noise's.

    Training metrics keep their names, the others are `SPLIT/name` and `noise/name`. Metrics by class are left out.
    """
    rows: dict[int, dict[str, Any]] = {}
    train: Mapping[str, Any] = {}
    for line in lines:
        kind, step = line["kind"], line["step"]
        numbers = {key: value for key, value in line.items() if key not in ("kind", "step", "epoch", "time")}
        numbers = {key: value for key, value in numbers.items() if not isinstance(value, Mapping | list)}
        if kind == "train":
            train = numbers
        elif kind == "eval":
            rows.setdefault(step, {"epoch": line["epoch"], "step": step, **train})
        if kind in ("eval", "noise") and step in rows:
            rows[step] |= {key if "/" in key else f"{kind}/{key}": value for key, value in numbers.items()}
    return list(rows.values())


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    columns = list(dict.fromkeys(["epoch", "step", *(key for row in rows for key in row)]))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _bar_text(metrics: Mapping[str, Any]) -> str:
    """`loss 0.53, accuracy 81.2%, 1,204 samples/s, data 3%`, as far as it is known."""
    layouts = {
        "loss": "loss {:.4g}",
        "accuracy": "accuracy {:.1%}",
        "samples_per_second": "{:,.0f} samples/s",
        "data_share": "data {:.0%}",
    }
    return ", ".join(layouts[key].format(metrics[key]) for key in layouts if metrics.get(key) is not None)


def _closing_table(folder: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    """The last evaluation, with the best where there is a best, and where everything is."""
    lines = [f"{folder} is finished"]
    for key, value in rows[-1].items() if rows else ():
        if isinstance(value, float) and (key in _CLOSING or key.endswith(("/top1", "/top5"))):
            lines.append(f"  {key:26} {value:>10.5g}" + (_best(rows, key) if key.endswith("/top1") else ""))
    return "\n".join([*lines, f"  more in {SUMMARY_CSV}, {SUMMARY_JSON} and {METRICS} of that folder"])


def _best(rows: Sequence[Mapping[str, Any]], key: str) -> str:
    value, back = max((row[key], -row["epoch"]) for row in rows if row.get(key) is not None)  # the earliest of equals
    return f"  (best {value:.5g}, epoch {-back})"
