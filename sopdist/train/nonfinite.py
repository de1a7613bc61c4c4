"""The guard against a loss that is not finite: a network that has diverged must not look like one that has converged.

Samples whose logits are not finite are left out of the loss. A few such steps are forgiven; more than
`train.max_nonfinite_steps` in a row end the run, with the step, the samples and a file to look at.

The count of a step is read when the next one begins, so that no step waits for the device, and travels with that step's
own sums, so that all ranks stop at the same step.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..data.batch import Batch
from ..files import write_whole
from .session import Session
from .world import TogetherError

_MOST_NAMED = 8
_logger = logging.getLogger("sopdist.train")


class NonFiniteError(Exception):
    """The loss was not finite for too many steps in a row. All ranks raise it at the same step."""


@dataclass(frozen=True)
class Watched:
    """A piece of a step."""

    index: Tensor
    labels: Tensor
    bad: Tensor  # (B,): which samples are not finite
    count: Callable[[], float]  # how many


class NonFiniteGuard:
    """Counts the steps in a row of which some sample was not finite."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._row: list[Watched] = []  # the pieces of the current step
        self._latest: list[Watched] = []  # the same of the step that is to be checked, if there is one

    def watch(self, piece: Batch, bad: Tensor) -> None:
        """A piece of the current step, and which of its samples (B,) are not finite."""
        self._row.append(Watched(piece.index, piece.labels, bad, _on_its_way(bad.sum())))

    def previous(self) -> float:
        """How many samples of this rank's latest step were not finite; a new step begins."""
        count = sum(watched.count() for watched in self._row)
        self._latest, self._row = self._row, []
        return count

    def check(self, nonfinite: float) -> None:
        """So many samples of the latest step, of all ranks, were not finite. Collective if it is too much."""
        if not self._latest:  # the first step of an epoch: the last one of the epoch before is checked already
            return
        session = self._session
        session.nonfinite_streak = session.nonfinite_streak + 1 if nonfinite else 0
        if nonfinite:
            session.engine.repair_statistics()
        if session.nonfinite_streak == 1 and session.world.rank == 0:
            step = session.step - 1
            _logger.warning("step %s: NOT FINITE: %s samples are left out of the loss", step, f"{nonfinite:.0f}")
        if session.nonfinite_streak > session.config.train.max_nonfinite_steps:
            self._stop()

    def flush(self) -> None:
        """The epoch is over: check its last step, too. Collective."""
        (nonfinite,) = self._session.world.sum([self.previous()])
        self.check(nonfinite)

    def _stop(self) -> None:
        session = self._session
        step, streak = session.step - 1, session.nonfinite_streak
        mine = [sample for watched in self._latest for sample in _describe(session, watched)]
        samples = [sample for rank in session.world.gather_objects(mine) for sample in rank]
        path = session.folder / f"nonfinite-step-{step}.json"
        content: dict[str, Any] = {"step": step, "epoch": step // session.stream.steps, "steps in a row": streak}
        content |= {"samples": samples}
        try:
            session.world.on_first(lambda: write_whole(path, (json.dumps(content, indent=1) + "\n").encode()))
            more_in = f"All of them are in {path}"
        except TogetherError as error:  # a full disk must not hide what has happened
            more_in = f"{path} cannot be written: {error}"
        named = ", ".join(str(sample["index"]) for sample in samples[:_MOST_NAMED])
        more = ", ..." if len(samples) > _MOST_NAMED else ""
        raise NonFiniteError(
            f"the loss is not finite, for {streak} steps in a row "
            f"(train.max_nonfinite_steps = {session.config.train.max_nonfinite_steps}); the last is step {step}, "
            f"epoch {step // session.stream.steps}, with {len(samples)} samples: index {named}{more}. "
            f"{more_in}. Lower optim.lr, clip the gradient (train.clip), or warm up "
            f"(optim.warmup_epochs)"
        )


def _describe(session: Session, watched: Watched) -> list[dict[str, Any]]:
    found = []
    for place in watched.bad.nonzero()[:, 0].tolist():
        index = int(watched.index[place])
        where = session.stream.split.where(index)
        found.append({"index": index, "label": int(watched.labels[place]), "rank": session.world.rank, "where": where})
    return found


def _on_its_way(count: Tensor) -> Callable[[], float]:
    """A number of the device that can be read later, without waiting for what the device was given to do since."""
    if count.device.type != "cuda":
        return lambda: float(count)
    here = torch.empty_like(count, device="cpu", pin_memory=True)
    here.copy_(count, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()

    def read() -> float:
        arrived.synchronize()
        return float(here)

    return read
