"""Exit status of a run, read from its summary. Does not import torch, so that commands that need only this are fast."""

from __future__ import annotations

import json
from pathlib import Path

from ...errors import DataError

FINISHED = "finished"


def read_exit_status(summary: Path) -> str:
    """Return `exit` of a summary: running, finished, preempted (possibly not saved), or another reason for the exit."""
    try:
        return str(json.loads(summary.read_text(encoding="utf-8"))["exit"])
    except FileNotFoundError:
        raise DataError(f"{summary.parent}: has no {summary.name}: no run has started there yet") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{summary}: not the summary of a run: {error}") from None
