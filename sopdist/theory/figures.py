"""The style of the figures: colours that colour-blind readers can distinguish, and the same bytes for the same numbers.

Figures are written to files; no display is needed.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # before pyplot: there may be no display

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..cli.output import write_output
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
    """A figure with (rows, columns) axes; `size` in inches."""
    pyplot.rcParams.update(_STYLE)
    return pyplot.subplots(rows, columns, figsize=size, squeeze=False)


def save_figure(figure: Figure, stem: Path, suffixes: Sequence[str] = (".png", ".svg")) -> list[Path]:
    """Write STEM.png and STEM.svg."""
    written = []
    for suffix in suffixes:
        content = io.BytesIO()
        metadata: Any = {"metadata": {"Date": None}} if suffix == ".svg" else {}
        with matplotlib.rc_context(_STYLE):
            figure.savefig(content, format=suffix[1:], dpi=150, **metadata)
        path = stem.with_name(stem.name + suffix)
        write_output(path, content.getvalue())
        written.append(path)
    pyplot.close(figure)
    return written


def plot_map(figure: Figure, axes: Axes, x: Array, y: Array, values: Array) -> None:
    """A map of `values` (len(y), len(x)) from 0 to 1 on a grid of cell centres, with a colour bar.

    The cells are one raster image, even in an SVG.
    """
    axes.grid(visible=False)
    colours = axes.pcolormesh(x, y, values, shading="nearest", cmap=MAP, rasterized=True, vmin=0, vmax=1)
    figure.colorbar(colours, ax=axes)


def plot_boundary(axes: Axes, x: Array, y: Array, label: str) -> None:
    """A dashed line with a white outline, visible on every colour of a map."""
    axes.plot(x, y, color="white", linewidth=2.5)
    axes.plot(x, y, color=COLOURS[1], linewidth=1.5, linestyle="--", label=label)
