"""How a run has ended, by its summary. Light: a command that only asks should not wait for torch."""

from __future__ import annotations

import json
from pathlib import Path

from ..data.errors import DataError

FINISHED = "finished"


def ending_of(summary: Path) -> str:
    """`exit` of a summary: running, finished, preempted (perhaps not saved), or what else has ended the run."""
    try:
        return str(json.loads(summary.read_text(encoding="utf-8"))["exit"])
    except FileNotFoundError:
        raise DataError(f"{summary.parent}: has no {summary.name}: no run has begun there yet") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{summary}: not the summary of a run: {error}") from None
