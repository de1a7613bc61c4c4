"""The progress of a run. `session.py` holds its parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass
class Progress:
    """Counters of a run, identical on every rank."""

    step: int = 0  # optimizer steps done
    best: float = -1.0  # top-1 of the best network so far
    best_step: int = -1  # the step after which it was evaluated
    failed_saves: int = 0
    nonfinite_streak: int = 0  # consecutive steps, up to now, with samples that are not finite; never saved in one
    network_lost: bool = False  # the network of the last step could not be saved

    def state(self) -> dict[str, Any]:
        """What is saved in a checkpoint."""
        return {
            "step": self.step, "best": self.best, "best_step": self.best_step, "failed_saves": self.failed_saves,
        }  # fmt: skip

    def load_state(self, state: Mapping[str, Any], *, same_run: bool) -> None:
        """Restore what `state` returned. The best score of another run is not carried over."""
        self.step, self.failed_saves = int(state["step"]), int(state.get("failed_saves", 0))
        if same_run:
            self.best, self.best_step = float(state["best"]), int(state.get("best_step", -1))
