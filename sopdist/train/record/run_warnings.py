"""Signs in the metrics of a run that its method does more harm than good."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_FALL = 0.01  # of top-1; less is noise


def accuracy_warnings(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """One sentence per evaluation split whose top-1 fell after the onset. `rows` are those of `summary_rows`."""
    if not rows or rows[-1].get("noise/onset") is None:
        return []
    last, onset = rows[-1], rows[-1]["noise/onset"]
    if onset == 0:
        return []
    first = next(row for row in rows if row.get("noise/onset") is not None)  # evaluated when the table began to act
    found = []
    for key in last:
        then, now = first.get(key), last.get(key)
        if key.endswith("/top1") and then is not None and now is not None and now < then - _FALL:
            found.append(
                f"{key} fell from {then:.1%} to {now:.1%} after the onset (epoch {onset:g}). Compare with a run with "
                f"method.name=ce, and with method.target=0"
            )
    return found
