"""What a probe has found out. Knows no probe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "missing", "broken", "note"]  # note: works, but somebody should know


@dataclass(frozen=True)
class Finding:
    """One line of the table."""

    what: str
    state: State
    detail: str  # versions, numbers, or what went wrong
    advice: str = ""  # what to do about it
    needed: bool = False  # training cannot run here unless it is ok

    @property
    def stops(self) -> bool:
        """Whether training cannot run here because of it."""
        return self.needed and self.state in ("missing", "broken")
