"""The demo as a figure: accuracy over the epochs, and the share of wrong labels that the network has memorised."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..errors import DataError
from ..train.record.metrics_file import read_lines
from ..train.record.run_folder import METRICS

_PANELS = {"test/top1": "test accuracy", "memorised": "wrong labels memorised"}
_STYLES = ("--", "-")


def plot_runs(runs: Mapping[str, Path], path: Path) -> None:
    """Write PATH with a curve for each run, given by name."""
    try:
        from ..theory.figures import COLOURS, new_figure, save_figure
    except ModuleNotFoundError as error:
        raise DataError(f"--figure needs {error.name}: pip install 'sopdist[theory]'") from None
    figure, axes = new_figure(1, len(_PANELS), (7.2, 2.9))
    for panel, (metric, title) in zip(axes[0], _PANELS.items(), strict=True):
        for (name, run), colour, style in zip(runs.items(), reversed(COLOURS[:2]), _STYLES, strict=False):
            lines = [line for line in read_lines(run / METRICS) if line.get(metric) is not None]
            last_of_epoch = {line["epoch"]: line[metric] for line in lines}
            epochs = [epoch + 1 for epoch in last_of_epoch]
            panel.plot(epochs, [100 * value for value in last_of_epoch.values()], style, color=colour, label=name)
        panel.set(title=title, xlabel="epoch", ylabel="%", ylim=(0, 102))
    axes[0][0].legend(loc="lower right")
    save_figure(figure, path.with_suffix(""), (path.suffix,))
