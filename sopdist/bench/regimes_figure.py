"""The results of `sopdist bench regimes` as a figure: accuracy relative to cross-entropy, and what the gate saw."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from ..errors import DataError
from .regimes_training import Result

_LABELS = {"elr": "ELR", "sop-always": "SOP from the first visit", "sop-auto": "SOP, the default"}
_MARKERS = ("s", "^", "o")
_SHOWN = {
    "quick": ("sym-40", "asym-40"),
    "features": ("sym-40",),
    "slow": ("sym-40", "clean"),
    "steps-slow": ("clean",),
}


def plot_results(results: Sequence[Result], path: Path) -> None:
    """Write PATH."""
    try:
        from ..theory.figures import COLOURS, new_figure, save_figure
    except ModuleNotFoundError as error:
        raise DataError(f"--figure needs {error.name}: pip install 'sopdist[theory]'") from None
    cells = list(dict.fromkeys(result.cell for result in results))[::-1]
    accuracy = {
        (method, cell): mean(found)
        for method in (*_LABELS, "ce")
        for cell in cells
        if (found := [result.test for result in results if result.method == method and result.cell == cell])
    }
    figure, axes = new_figure(1, 2, (9.6, 0.6 + 0.2 * len(cells)))
    left, right = axes[0]
    for (method, label), marker, colour in zip(_LABELS.items(), _MARKERS, COLOURS, strict=False):
        gains = {cell: accuracy[method, cell] - accuracy["ce", cell] for cell in cells if (method, cell) in accuracy}
        rows = [cells.index(cell) for cell in gains]
        left.plot([100 * gain for gain in gains.values()], rows, marker, color=colour, label=label, alpha=0.8)
    left.axvline(0, color="0.4", linewidth=1)
    left.set_yticks(range(len(cells)), [" ".join(cell) for cell in cells], fontsize=7)
    left.set(title="test accuracy minus that of cross-entropy", xlabel="points")
    left.legend(loc="lower right")
    chosen = [(name, noise) for name, noises in _SHOWN.items() for noise in noises]
    for number, cell in enumerate(chosen):
        runs = [result for result in results if result.cell == cell and result.method == "sop-auto"]
        signal = [value for run in runs[:1] for value in run.signal if value is not None]
        if not signal:
            continue
        colour = COLOURS[number % len(COLOURS)]
        epochs = range(3, 3 + len(signal))
        right.plot(epochs, [value / signal[0] for value in signal], "-", color=colour, label=" ".join(cell))
        if runs[0].onset is not None:
            right.plot(epochs[-1], signal[-1] / signal[0], "o", color=colour)
    right.set(title="the sign of the onset, relative to its first value", xlabel="epoch")
    right.legend(loc="upper right")
    save_figure(figure, path.with_suffix(""), (path.suffix,))
