"""A target and whether a run met it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """A target, what was measured, and whether it was met; None where this run has nothing to say on it."""

    target: str
    measured: str
    met: bool | None

    def __str__(self) -> str:
        if self.met is None:
            return f"not measured  {self.target}"
        return f"{'met' if self.met else 'MISSED':<12}  {self.target}: {self.measured}"
