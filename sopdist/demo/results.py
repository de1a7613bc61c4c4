"""Results of the demo, read from the files of its runs: CE and SOP side by side, and the most suspicious labels."""

from __future__ import annotations

import io
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..checkpoint import complete_checkpoints, names, open_checkpoint
from ..cli.tables import format_table
from ..data.labels import CLEAN
from ..data.split import open_split
from ..export.noise_table import SavedTable
from ..train.config import read_config
from ..train.record.metrics_file import read_lines
from ..train.record.run_folder import CONFIG, METRICS, SUMMARY_JSON

_ACCURACY = "test/top1"
SHADES = " .:-=+*#%@"  # from pixel value 0 to 255
_WIDTH = 16  # characters per image


class Run(NamedTuple):
    """Metrics of a finished run."""

    last: Mapping[str, Any]  # metrics at the end of the run
    best: float  # best test accuracy of any epoch
    best_epoch: int  # counted from 0, as in metrics.jsonl
    speed: float  # samples/s, median over the epochs


def is_finished(folder: Path) -> bool:
    """Whether the run's summary says that it has finished."""
    try:
        return bool(json.loads((folder / SUMMARY_JSON).read_text())["finished"])
    except (OSError, ValueError, KeyError):
        return False


def read_run(folder: Path) -> Run:
    """Read the summary and the metrics of a run."""
    last = json.loads((folder / SUMMARY_JSON).read_text())["last"]
    lines = list(read_lines(folder / METRICS))
    evaluations = [(line[_ACCURACY], -line["epoch"]) for line in lines if _ACCURACY in line]
    best, epoch = max(evaluations)  # of equally good epochs, the earliest
    speeds = [line["samples_per_second"] for line in lines if line.get("samples_per_second")]
    return Run(last, best, -epoch, statistics.median(speeds))


def format_comparison(ce: Run, sop: Run) -> str:
    """A table of both runs, and how well SOP detected the wrong labels."""
    rows = [
        ("", "CE", "SOP"),
        ("test accuracy, last epoch", *(_percent(run.last[_ACCURACY]) for run in (ce, sop))),
        ("test accuracy, best epoch", *(f"{_percent(run.best)} (epoch {run.best_epoch})" for run in (ce, sop))),
        ("wrong labels memorised", *(_percent(run.last.get("memorised")) for run in (ce, sop))),
        ("samples/s", *(f"{run.speed:,.0f}" for run in (ce, sop))),
    ]
    noise = {key.removeprefix("noise/"): value for key, value in sop.last.items() if key.startswith("noise/")}
    return "\n".join([format_table(None, rows), "", *_describe_noise(noise)])


def _describe_noise(noise: Mapping[str, Any]) -> list[str]:
    """Sentences about the detected noise. Without wrong labels, ranking and flags have no score."""
    lines = []
    if noise["auroc"] is not None:
        lines = [
            f"SOP ranks wrong labels above correct ones with an AUROC of {noise['auroc']:.3f}, "
            f"average precision {noise['average_precision']:.3f}.",
            f"It flags {noise['flagged']} labels with {_percent(noise['flag_precision'])} precision "
            f"and {_percent(noise['flag_recall'])} recall.",
        ]
    return [
        *lines,
        f"Noise rate: {_percent(noise['rate'])} estimated, {_percent(noise['true_rate'])} true. "
        f"Label accuracy: {_percent(noise['given_accuracy'])} as given, "
        f"{_percent(noise['corrected_accuracy'])} as proposed.",
    ]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def draw_suspects(run: Path, count: int) -> str:
    """Draw the images of the `count` most suspicious labels side by side, in characters.

    Below each image: its label as given, as proposed and the clean one, and the index of the sample.
    """
    config = read_config(run / CONFIG)
    with open_split(config.data.location) as split:
        given, clean = (split.labels(name).labels.astype(np.int64) for name in (config.data.labels, CLEAN))
        saved = open_checkpoint(complete_checkpoints(run)[-1])
        sop = SavedTable(saved.table("noise"), saved.section(names.METHOD).get("onset"))
        suspects = sop.suspects(count).tolist()
        proposed = sop.proposed_labels(torch.from_numpy(given)).numpy()
        images = [draw_image(_read_pixels(split.image(index))) for index in suspects]
    lines = ["   ".join(line) for line in zip(*images, strict=True)]
    for name, labels in (("given", given), ("proposed", proposed), ("true", clean)):
        lines.append("   ".join(f"{f'{name} {labels[index]}':{_WIDTH}}" for index in suspects))
    lines.append("   ".join(f"{f'sample {index}':{_WIDTH}}" for index in suspects))
    return f"\nThe {len(suspects)} most suspicious labels:\n\n" + "\n".join(line.rstrip() for line in lines)


def _read_pixels(image: bytes) -> NDArray[np.uint8]:
    """Decode a greyscale image: (height, width)."""
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(image)).convert("L"))


def draw_image(pixels: NDArray[np.uint8]) -> list[str]:
    """Draw an 8 x 8 image as 8 lines of 16 characters: a character is twice as high as it is wide."""
    shades = np.rint(pixels.astype(float) * ((len(SHADES) - 1) / 255)).astype(int)
    return ["".join(SHADES[shade] * 2 for shade in line) for line in shades]
