"""The list that a run is for: which labels are most likely wrong, and what they should be, as a table for people."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..files import write_whole

Array = NDArray[Any]


def write_suspects(
    path: Path, scores: Array, flags: Array, proposed: Array, given: Array, classes: Sequence[str], most: int
) -> None:
    """The `most` most suspicious samples that were visited, the worst first. All arrays are (N,)."""
    order = np.argsort(-scores, kind="stable")[:most]
    order = order[np.isfinite(scores[order])]  # never visited: -inf
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["index", "score", "given", "proposed", "flagged", "given_name", "proposed_name"])
    for sample in order.tolist():
        was, instead = int(given[sample]), int(proposed[sample])
        names = classes[was], classes[instead]
        table.writerow([sample, f"{scores[sample]:.6g}", was, instead, int(flags[sample]), *names])
    write_whole(path, text.getvalue().encode(errors="replace"))
