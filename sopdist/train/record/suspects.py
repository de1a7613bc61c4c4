"""`suspects.csv`: the samples whose labels are most likely wrong, and the proposed labels."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...files import write_atomic
from ...methods import Readout


def write_suspects(path: Path, readout: Readout, given: NDArray[Any], classes: Sequence[str], limit: int) -> None:
    """Write the `limit` most suspicious samples that were visited, the worst first, for given labels (N,)."""
    order = np.argsort(-readout.scores, kind="stable")[:limit]
    order = order[np.isfinite(readout.scores[order])]  # -inf: never visited
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["index", "score", "given", "proposed", "flagged", "given_name", "proposed_name"])
    for sample in order.tolist():
        label, proposed = int(given[sample]), int(readout.proposed[sample])
        score, flag = f"{readout.scores[sample]:.6g}", int(readout.flags[sample])
        table.writerow([sample, score, label, proposed, flag, classes[label], classes[proposed]])
    write_atomic(path, text.getvalue().encode(errors="replace"))
