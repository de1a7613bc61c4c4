"""Test accuracy over epochs: the mean over the seeds of each method, with a band of one standard error."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, product
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import DataError
from .plan import Comparison
from .results import Mean, Results, Row, mean_of

if TYPE_CHECKING:
    from matplotlib.lines import Line2D

CURVES = "curves"
_STYLES = ("-", "--", "-.", ":")
_COLUMNS = 3  # panels next to each other
_HEADROOM = 0.06  # of the range of the values, above and below


def plot_curves(comparison: Comparison, found: Sequence[Results]) -> list[Path]:
    """Write curves.svg and curves.png, with a panel per label set, if any run is finished.

    DataError if matplotlib is missing.
    """
    if not any(row.finished for results in found for row in results.rows):
        return []
    try:
        from ..theory.figures import COLOURS, new_figure, save_figure
    except ModuleNotFoundError as error:
        raise DataError(f"curves need {error.name}: pip install 'sopdist[theory]'") from None
    columns = min(len(found), _COLUMNS)
    rows = -(-len(found) // columns)
    figure, axes = new_figure(rows, columns, (1.6 + 3.4 * columns, 0.2 + 3.0 * rows))
    for unused in axes.flat[len(found) :]:
        unused.remove()
    handles: dict[str, Line2D] = {}
    looks = dict(zip(comparison.entries, cycle(product(_STYLES, COLOURS)), strict=False))
    for panel, results in zip(axes.flat, found, strict=False):
        for row in results.rows:
            curve = curve_of(row)
            if not curve:
                continue
            style, colour = looks[row.entry]
            epochs = [epoch + 1 for epoch in curve]
            marker = "o" if len(curve) == 1 else None
            values = [100 * mean.value for mean in curve.values()]
            errors = [100 * (mean.error or 0.0) for mean in curve.values()]
            (line,) = panel.plot(epochs, values, style, color=colour, marker=marker, linewidth=1.5)
            below, above = ([v + sign * e for v, e in zip(values, errors, strict=True)] for sign in (-1, 1))
            panel.fill_between(epochs, below, above, color=colour, alpha=0.2, linewidth=0)
            handles.setdefault(row.entry.text, line)
        wrong = "" if results.wrong is None else f", {results.wrong:.0%} wrong"
        panel.set(title=f"{results.labels}{wrong}", xlabel="epoch")
        panel.margins(x=0.01, y=_HEADROOM)
        panel.xaxis.get_major_locator().set_params(integer=True)
    for panel in axes[:, 0]:
        panel.set_ylabel(f"accuracy on {comparison.test} in %")
    seeds = len(comparison.request.seeds)
    title = "one seed" if seeds == 1 else f"mean of {seeds} seeds\n± standard error"
    style_of_legend = {"frameon": False, "title": title, "title_fontsize": 8, "alignment": "left"}
    figure.legend(list(handles.values()), list(handles), loc="outside right center", **style_of_legend)
    return save_figure(figure, comparison.out / CURVES)


def curve_of(row: Row) -> dict[int, Mean]:
    """The mean over the finished runs after each epoch that all of them evaluated; epochs count from 0."""
    curves = [result.curve for result in row.finished]
    if not curves:
        return {}
    shared = sorted(set(curves[0]).intersection(*curves[1:]))
    means = {epoch: mean_of(curve[epoch] for curve in curves) for epoch in shared}
    return {epoch: mean for epoch, mean in means.items() if mean is not None}
