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
    before = [row for row in rows if row["epoch"] < onset]  # `onset` epochs had ended
    found = []
    for key in last if before else ():
        then, now = before[-1].get(key), last.get(key)
        if key.endswith("/top1") and then is not None and now is not None and now < then - _FALL:
            found.append(
                f"{key} fell from {then:.1%} to {now:.1%} after the onset (epoch {onset:g}). Compare with a run with "
                f"method.name=ce, and with method.target=0"
            )
    return found
