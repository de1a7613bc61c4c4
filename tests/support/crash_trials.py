"""Which crashes are tried, and what must hold after each of them.

The file operations of a run come from a reference run that nothing happens to. Checkpoints are saved synchronously
(`SYNC`) where operations are counted, because then they always come in the same order.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from tests.support.crashing import EPOCH, INTERVAL, STEPS, Outcome, Trial, TrialRunner
from tests.support.exactness import deterministic_metrics
from tests.support.file_faults import KILL

KILLED = -9
DUE = sorted({*range(INTERVAL, STEPS + 1, INTERVAL), *range(EPOCH, STEPS + 1, EPOCH)})  # steps with a checkpoint
SYNC = ("checkpoint.async=false",)
SAVE, OLDER = "checkpoints/step-00000010", "checkpoints/step-00000008"  # a save, and the checkpoint that it removes
ERRORS = ("ENOSPC", "EACCES", "EIO")
_TENSORS = "safetensors.part"


@dataclass(frozen=True)
class Reference:
    """The operations of a run without faults, counted from 1 as in `Trial.at`."""

    texts: list[str]  # "mkdir checkpoints", ...

    @property
    def save(self) -> list[int]:
        """The operations of one save, from the first to the lines of metrics.jsonl after it."""
        first = self.texts.index(f"mkdir {SAVE}")
        last = next(n for n, text in enumerate(self.texts[first:], first) if text == "write metrics.jsonl")
        return list(range(first + 1, last + 2))

    @property
    def distinct(self) -> list[int]:
        """Those of a save that are not just another tensor in the same file."""
        texts = [self.texts[number - 1] for number in self.save]
        pairs = zip(["", *texts], texts, strict=False)
        repeated = [before == after and after.endswith(_TENSORS) for before, after in pairs]
        return [number for number, skip in zip(self.save, repeated, strict=True) if not skip]

    @property
    def writes(self) -> list[int]:
        """Those of `distinct` that write to a file."""
        return [number for number in self.distinct if self.texts[number - 1].startswith("write ")]

    @property
    def others(self) -> list[int]:
        """All that do not belong to this save."""
        return sorted({*range(1, len(self.texts) + 1)} - set(self.save))


def run_reference(runner: TrialRunner) -> Reference:
    """Train without faults on one and on two ranks; the runs are `reference-1` and `reference-2`."""
    one, two = runner.run([Trial("reference-1", keys=SYNC), Trial("reference-2", ranks=2)])
    assert (one.codes, one.last_step, two.codes, two.last_step) == ([0], STEPS, [0, 0], STEPS)
    assert one.complete[-1] == two.complete[-1] == STEPS
    return Reference(one.operations)


def reference_of(runner: TrialRunner, trial: Trial) -> Path:
    return runner.workspace / "runs" / f"reference-{trial.ranks}"


# --- trials ----------------------------------------------------------------------------------------------------------


def kills(name: str, numbers: Sequence[int], kind: str = KILL, **more: int) -> list[Trial]:
    """Killed at each of these operations."""
    return [Trial(f"{name}-{number}", kind=kind, at=number, keys=SYNC, **more) for number in numbers]


def random_moments(name: str, count: int, longest: float) -> list[Trial]:
    """Killed at a random time, up to `longest` seconds after a random step, while saves run in the background."""
    draw = random.Random(name)
    steps = [draw.randint(1, STEPS - 2) for _ in range(count)]
    return [
        Trial(f"{name}-{number}", killed_after=draw.uniform(0.001, longest), after_step=step)
        for number, step in enumerate(steps)
    ]


def kills_in_background(name: str, count: int, operations: int, **more: int) -> list[Trial]:
    """Killed at a random operation, while saves run in the background."""
    draw = random.Random(name)
    numbers = draw.sample(range(30, operations), count)
    return [Trial(f"{name}-{number}", kind=KILL, at=number, **more) for number in numbers]


def disk_errors(name: str, numbers: Sequence[int], **more: int) -> list[Trial]:
    """Each operation fails with one of the errors of a disk, in turn."""
    return [
        Trial(f"{name}-{kind}-{number}", kind=kind, at=number, keys=SYNC, **more)
        for number, kind in zip(numbers, cycle(ERRORS), strict=False)
    ]


# --- checks ----------------------------------------------------------------------------------------------------------


def crash(runner: TrialRunner, trials: Sequence[Trial]) -> int:
    """Run trials that crash. Return how many were really killed: a random moment may have been too late."""
    outcomes = runner.run(trials)
    for trial, outcome in zip(trials, outcomes, strict=True):
        assert_survived(runner, trial, outcome)
    return sum(KILLED in outcome.codes for outcome in outcomes)


def assert_survived(runner: TrialRunner, trial: Trial, outcome: Outcome, code: int = KILLED) -> None:
    """Complete checkpoints are intact, at most the steps since the previous save are lost, and the result is exact."""
    message = f"{trial}\n{outcome.log[-3000:]}"
    assert code in outcome.codes or trial.killed_after, message
    assert outcome.damaged == [], message
    newest = outcome.complete[-1] if outcome.complete else 0
    # A save in the background is complete when the next one starts, at the latest.
    unfinished = 1 if SYNC[0] in trial.keys else 2
    started = [0] * (unfinished + 1) + [step for step in DUE if step <= outcome.last_step]
    assert newest >= started[-1 - unfinished], message
    if unfinished == 1:
        assert outcome.last_step - newest <= INTERVAL, message
    assert outcome.resumed == [0] * trial.ranks, message
    if "has already finished" in outcome.log:  # killed after the last step
        assert newest == STEPS, message
    else:
        assert (f"step-{newest:08d} at step {newest}" in outcome.log) == (newest > 0), message
    assert "cannot be used" not in outcome.log, message
    run, reference = runner.run_of(trial), reference_of(runner, trial)
    assert deterministic_metrics(run) == deterministic_metrics(reference), message
    name = "network-last.safetensors"
    assert (run / name).read_bytes() == (reference / name).read_bytes(), message
