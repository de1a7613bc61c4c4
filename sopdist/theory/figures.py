"""How the figures look: colours that can be told apart by everybody, and files that are the same bytes for the same
numbers. Draws on no screen."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # before pyplot: there may be no screen

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..data.commands.output import write_output
from .problem import Array

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito
MARKERS = "os^Dv<>"
MAP = "cividis"
_STYLE: Any = {
    "figure.constrained_layout.use": True,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "font.size": 9,
    "axes.titlesize": 10,
    "legend.fontsize": 8,
    "legend.framealpha": 0.9,
    "svg.hashsalt": "sopdist",
}


def new_figure(rows: int, columns: int, size: tuple[float, float]) -> tuple[Figure, Any]:
    """A figure with (rows, columns) axes; inches."""
    pyplot.rcParams.update(_STYLE)
    return pyplot.subplots(rows, columns, figsize=size, squeeze=False)


def save_figure(figure: Figure, stem: Path) -> list[Path]:
    """STEM.png and STEM.svg."""
    written = []
    for ending, options in ((".png", {"dpi": 150}), (".svg", {"dpi": 150, "metadata": {"Date": None}})):
        content = io.BytesIO()
        with matplotlib.rc_context(_STYLE):
            figure.savefig(content, format=ending[1:], **options)
        path = stem.with_name(stem.name + ending)
        write_output(path, content.getvalue())
        written.append(path)
    pyplot.close(figure)
    return written


def heat_map(axes: Axes, x: Array, y: Array, values: Array, **options: Any) -> Any:
    """Colours of `values` (len(y), len(x)) on a grid of centres; the cells as one picture, also in an SVG."""
    axes.grid(visible=False)
    return axes.pcolormesh(x, y, values, shading="nearest", cmap=MAP, rasterized=True, **options)
