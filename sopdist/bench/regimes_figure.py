"""The results of `sopdist bench regimes` as figures: accuracy relative to cross-entropy, and the sign of the onset."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from ..errors import DataError
from .regimes_training import REGIMES, Result

_LABELS = {"elr": "ELR", "sop-always": "SOP from the first visit", "sop-auto": "SOP, the default"}
_MARKERS = ("s", "^", "o")
_PANELS = {
    "networks that memorise": (("quick", "sym-40"), ("quick", "asym-40"), ("pairs", "sym-40"), ("features", "sym-40")),
    "networks that do not": (("slow", "clean"), ("slow", "sym-40"), ("steps-slow", "clean"), ("steps-slow", "inst-40")),
}


def plot_results(results: Sequence[Result], folder: Path) -> None:
    """Write regimes.png and onset.png."""
    try:
        from ..theory.figures import COLOURS, new_figure, save_figure
    except ModuleNotFoundError as error:
        raise DataError(f"--figures needs {error.name}: pip install 'sopdist[theory]'") from None
    order = list(REGIMES)
    cells = sorted({result.cell for result in results}, key=lambda cell: (-order.index(cell[0]), cell[1]))
    accuracy = {
        (method, cell): mean(found)
        for method in (*_LABELS, "ce")
        for cell in cells
        if (found := [result.test for result in results if result.method == method and result.cell == cell])
    }
    figure, axes = new_figure(1, 1, (6.4, 0.9 + 0.19 * len(cells)))
    axis = axes[0][0]
    for (method, label), marker, colour in zip(_LABELS.items(), _MARKERS, COLOURS, strict=False):
        gains = {
            row: 100 * (accuracy[method, cell] - accuracy["ce", cell])
            for row, cell in enumerate(cells)
            if (method, cell) in accuracy and ("ce", cell) in accuracy
        }
        axis.plot(list(gains.values()), list(gains), marker, color=colour, label=label, alpha=0.8, markersize=5)
    axis.axvline(0, color="0.4", linewidth=1)
    axis.set_yticks(range(len(cells)), [" ".join(cell) for cell in cells], fontsize=7)
    axis.set(title="test accuracy, compared with cross-entropy", xlabel="points", ylim=(-0.7, len(cells) - 0.3))
    axis.legend(loc="center right")
    save_figure(figure, folder / "regimes", (".png",))

    figure, axes = new_figure(1, 2, (7.2, 3.0))
    for panel, (title, chosen) in zip(axes[0], _PANELS.items(), strict=True):
        for cell, colour in zip(chosen, COLOURS, strict=False):
            run = next((result for result in results if result.cell == cell and result.method == "sop-auto"), None)
            signal = [(epoch, value) for epoch, value in enumerate(run.signal if run else (), 1) if value is not None]
            if run is None or not signal:
                continue
            epochs, values = zip(*signal, strict=True)
            panel.plot(epochs, values, "-", color=colour, label=" ".join(cell))
            if run.onset is not None:
                panel.plot(epochs[-1], values[-1], "o", color=colour)
        panel.set(title=title, xlabel="epoch", ylabel="mean p of contradicted labels", xlim=(2, None), ylim=(0, None))
        if panel.lines:
            panel.legend(loc="best")
    save_figure(figure, folder / "onset", (".png",))
