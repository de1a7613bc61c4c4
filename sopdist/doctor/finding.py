"""The result of a probe. This file does not know the probes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "missing", "broken", "note"]  # note: works, but the user should know about it


@dataclass(frozen=True)
class Finding:
    """One line of the table."""

    what: str
    state: State
    detail: str  # version, measured value, or error
    advice: str = ""  # what to do about it
    needed: bool = False  # training cannot run without it

    @property
    def blocks_training(self) -> bool:
        """Whether training cannot run here because of this finding."""
        return self.needed and self.state in ("missing", "broken")
