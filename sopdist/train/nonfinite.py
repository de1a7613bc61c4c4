"""The guard against a loss that is not finite: divergence must not look like convergence.

Samples whose logits are not finite are left out of the loss. A few such steps are tolerated; more than
`train.max_nonfinite_steps` consecutive ones end the run, with the step, the samples and a file that lists them.

The count of a step is read when the next one starts, so that no step waits for the device, and is reduced with that
step's own sums, so that all ranks stop at the same step.
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
from ..files import write_atomic
from .distributed.world import CollectiveError
from .progress import Progress
from .session import Session

_MOST_NAMED = 8
_logger = logging.getLogger("sopdist.train")


class NonFiniteError(CollectiveError):
    """The loss was not finite for too many consecutive steps. All ranks raise it at the same step."""

    exit_code = 3


@dataclass(frozen=True)
class Watched:
    """A micro-batch of a step."""

    index: Tensor
    labels: Tensor
    bad: Tensor  # (B,): which samples are not finite
    count: Callable[[], float]  # how many


class NonFiniteGuard:
    """Counts consecutive steps with samples that are not finite, in `progress.nonfinite_streak`."""

    def __init__(self, session: Session, progress: Progress) -> None:
        self._session, self._progress = session, progress
        self._current: list[Watched] = []  # micro-batches of the current step
        self._latest: list[Watched] = []  # those of the step to be checked, if there is one

    def watch(self, batch: Batch, bad: Tensor) -> None:
        """Add a micro-batch of the current step, and which of its samples (B,) are not finite."""
        self._current.append(Watched(batch.index, batch.labels, bad, _read_later(bad.sum())))

    def previous(self) -> float:
        """How many samples of this rank's latest step were not finite. Call it at the start of a step."""
        count = sum(watched.count() for watched in self._current)
        self._latest, self._current = self._current, []
        return count

    def check(self, nonfinite: float) -> None:
        """Check the latest step, given its number of non-finite samples over all ranks. Collective if the run stops."""
        if not self._latest:  # the first step of an epoch: the last step of the previous epoch has been checked
            return
        session, progress = self._session, self._progress
        progress.nonfinite_streak = progress.nonfinite_streak + 1 if nonfinite else 0
        if nonfinite:
            session.engine.repair_statistics()
        if progress.nonfinite_streak == 1 and session.world.rank == 0:
            step = progress.step - 1
            _logger.warning("step %s: %s samples have a non-finite loss and are excluded", step, f"{nonfinite:.0f}")
        if progress.nonfinite_streak > session.config.train.max_nonfinite_steps:
            self._stop()

    def flush(self) -> None:
        """Check the latest step now: at the end of an epoch, or before a save. Collective."""
        (nonfinite,) = self._session.world.sum([self.previous()])
        self.check(nonfinite)

    def _stop(self) -> None:
        session = self._session
        step, streak = self._progress.step - 1, self._progress.nonfinite_streak
        mine = [sample for watched in self._latest for sample in _describe(session, watched)]
        samples = [sample for rank in session.world.gather_objects(mine) for sample in rank]
        path = session.folder / f"nonfinite-step-{step}.json"
        content: dict[str, Any] = {"step": step, "epoch": step // session.stream.steps, "consecutive_steps": streak}
        content |= {"samples": samples}
        try:
            session.world.on_rank0(lambda: write_atomic(path, (json.dumps(content, indent=1) + "\n").encode()))
            more_in = f"All of them are in {path}"
        except CollectiveError as error:  # a full disk must not hide the cause
            more_in = f"{path} cannot be written: {error}"
        named = ", ".join(str(sample["index"]) for sample in samples[:_MOST_NAMED])
        more = ", ..." if len(samples) > _MOST_NAMED else ""
        raise NonFiniteError(
            f"the loss is not finite for {streak} consecutive steps "
            f"(train.max_nonfinite_steps = {session.config.train.max_nonfinite_steps}); the last is step {step}, "
            f"epoch {step // session.stream.steps}, with {len(samples)} samples: index {named}{more}. "
            f"{more_in}. Lower optim.lr, clip the gradient (train.clip), or warm up "
            f"(optim.warmup_epochs)"
        )


def _describe(session: Session, watched: Watched) -> list[dict[str, Any]]:
    found = []
    for position in watched.bad.nonzero()[:, 0].tolist():
        index = int(watched.index[position])
        where = session.stream.split.where(index)
        found.append(
            {"index": index, "label": int(watched.labels[position]), "rank": session.world.rank, "where": where}
        )
    return found


def _read_later(count: Tensor) -> Callable[[], float]:
    """A number on the device that can be read later, without waiting for work that was queued since."""
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
