"""Killed at any moment, also between any two operations on files, a run goes on from a checkpoint that is whole.

After every crash: whatever looks complete is intact, no more is lost than since the save before, and the run that goes
on ends as the one that never crashed, bit for bit. A disk that fails costs checkpoints, not the run.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

import pytest

from tests.e2e.crashing import EPOCH, INTERVAL, STEPS, Outcome, Trial, run_trials, write_place
from tests.e2e.exactness import told_by
from tests.e2e.file_faults import KILL, TORN

KILLED = -9
DUE = sorted({*range(INTERVAL, STEPS + 1, INTERVAL), *range(EPOCH, STEPS + 1, EPOCH)})  # steps with a checkpoint
AT_ONCE = ("checkpoint.async=false",)  # operations come in the same order each time
SAVE, OLDER = "checkpoints/step-00000010", "checkpoints/step-00000008"  # one in the middle, and what it removes
ERRORS = ("ENOSPC", "EACCES", "EIO")
TENSORS = "safetensors.part"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_place(tmp_path_factory.mktemp("crashes"))


@pytest.fixture(scope="module")
def whole(place: Path) -> Outcome:
    """A run to which nothing happens, and what it does to files; `runs/whole-2` is one of two ranks."""
    one, two = run_trials(place, [Trial("whole", keys=AT_ONCE), Trial("whole-2", ranks=2)])
    assert (one.codes, one.told, two.codes, two.told) == ([0], STEPS, [0, 0], STEPS)
    assert one.complete[-1] == two.complete[-1] == STEPS
    return one


def of_a_save(whole: Outcome) -> list[int]:
    """The numbers of the operations of one save, from the first to the lines of metrics.jsonl that come after it."""
    first = whole.done.index(f"mkdir {SAVE}")
    last = next(number for number, text in enumerate(whole.done[first:], first) if text == "write metrics.jsonl")
    return list(range(first + 1, last + 2))


def telling(whole: Outcome, numbers: Sequence[int]) -> list[int]:
    """Of operations, those that are not yet another tensor in the same file."""
    texts = [whole.done[number - 1] for number in numbers]
    same = [before == after and after.endswith(TENSORS) for before, after in zip(["", *texts], texts, strict=False)]
    return [number for number, dull in zip(numbers, same, strict=True) if not dull]


def assert_survived(place: Path, trial: Trial, outcome: Outcome, code: int = KILLED) -> None:
    told = f"{trial}\n{outcome.said[-3000:]}"
    assert code in outcome.codes or trial.killed_after, told
    assert outcome.damaged == [], told
    newest = outcome.complete[-1] if outcome.complete else 0
    # One that is written in the background is done when the next one begins, at the latest.
    under_way = 1 if AT_ONCE[0] in trial.keys else 2
    begun = [0] * (under_way + 1) + [step for step in DUE if step <= outcome.told]
    assert newest >= begun[-1 - under_way], told
    if under_way == 1:
        assert outcome.told - newest <= INTERVAL, told
    assert outcome.resumed == [0] * trial.ranks, told
    if "is finished already" in outcome.said:  # killed when all was done
        assert newest == STEPS, told
    else:
        assert (f"step-{newest:08d}, at step {newest}" in outcome.said) == (newest > 0), told
    assert "CANNOT BE USED" not in outcome.said, told
    uninterrupted = place / "runs" / ("whole" if trial.ranks == 1 else f"whole-{trial.ranks}")
    assert told_by(place / "runs" / trial.name) == told_by(uninterrupted), told
    assert (place / "runs" / trial.name / "network-last.safetensors").read_bytes() == (
        uninterrupted / "network-last.safetensors"
    ).read_bytes(), told


def crash(place: Path, trials: Sequence[Trial]) -> int:
    """How many of them have really crashed: a moment may have been too late."""
    outcomes = run_trials(place, trials)
    for trial, outcome in zip(trials, outcomes, strict=True):
        assert_survived(place, trial, outcome)
    return sum(KILLED in outcome.codes for outcome in outcomes)


def kills(name: str, numbers: Sequence[int], kind: str = KILL, **more: int) -> list[Trial]:
    return [Trial(f"{name}-{number}", kind=kind, at=number, keys=AT_ONCE, **more) for number in numbers]


def moments(name: str, count: int, longest: float, **more: int) -> list[Trial]:
    """Killed, while saves go on in the background, some time after the first step."""
    draw = random.Random(name)
    return [Trial(f"{name}-{number}", killed_after=draw.uniform(0.001, longest), **more) for number in range(count)]


def in_the_background(name: str, count: int, operations: int, **more: int) -> list[Trial]:
    draw = random.Random(name)
    numbers = draw.sample(range(30, operations), count)
    return [Trial(f"{name}-{number}", kind=KILL, at=number, **more) for number in numbers]


def test_killed_between_operations_of_a_save_or_while_it_writes(place: Path, whole: Outcome) -> None:
    numbers = telling(whole, of_a_save(whole))
    writes = [number for number in numbers if whole.done[number - 1].startswith("write ")]
    trials = [*kills("quick", numbers[::3]), *kills("quick-torn", writes[::2], TORN)]
    trials += [*in_the_background("quick-random", 2, 400), *kills("quick-twice", numbers[8:9], again=12)]
    assert crash(place, trials) == len(trials)


@pytest.mark.long
def test_killed_at_two_hundred_places(place: Path, whole: Outcome) -> None:
    save = of_a_save(whole)
    writes = [number for number in telling(whole, save) if whole.done[number - 1].startswith("write ")]
    others = sorted({*range(1, len(whole.done) + 1)} - set(save))
    trials = [
        *kills("save", save),
        *kills("torn", [*writes, *(number + 5 for number in writes[:1])], TORN),
        *kills("anywhere", others[:: len(others) // 40]),
        *(kills(f"twice-{number}", [save[number]], again=number + 3)[0] for number in range(20)),
        *moments("moment", 60, longest=0.25),
        *in_the_background("background", 25, 450),
        *in_the_background("first-of-two", 8, 380, ranks=2),
        *in_the_background("second-of-two", 8, 200, ranks=2, victim=1),
    ]
    assert crash(place, trials) >= 200


def errors(name: str, numbers: Sequence[int], **more: int) -> list[Trial]:
    """Each operation fails in one of the ways in which disks fail."""
    return [
        Trial(f"{name}-{kind}-{number}", kind=kind, at=number, keys=AT_ONCE, **more)
        for number, kind in zip(numbers, cycle(ERRORS), strict=False)
    ]


def assert_went_on(place: Path, trials: Sequence[Trial]) -> None:
    for trial, outcome in zip(trials, run_trials(place, trials), strict=True):
        told = f"{trial} {outcome.done[trial.at - 1 :][:1]}\n{outcome.said[-3000:]}"
        assert (outcome.codes, outcome.resumed) == ([0] * trial.ranks, [0] * trial.ranks), told
        assert (outcome.complete[-1], outcome.damaged) == (STEPS, []), told
        operation = outcome.done[trial.at - 1]  # to remove an older one, and to write a line, can wait
        failed = OLDER not in operation and operation not in ("open metrics.jsonl", "write metrics.jsonl")
        assert outcome.said.count("COULD NOT SAVE, the run goes on") == failed, told
        run = place / "runs" / trial.name
        assert json.loads((run / "summary.json").read_text())["failed_saves"] == failed, told
        uninterrupted = place / "runs" / ("whole" if trial.ranks == 1 else f"whole-{trial.ranks}")
        assert results_of(run) == results_of(uninterrupted), told


def results_of(run: Path) -> list[dict[str, object]]:
    return [{key: value for key, value in line.items() if key != "failed_saves"} for line in told_by(run)]


def test_an_operation_that_fails_costs_a_checkpoint_at_most(place: Path, whole: Outcome) -> None:
    assert_went_on(place, errors("quick-failing", telling(whole, of_a_save(whole))[::5]))


@pytest.mark.long
def test_any_operation_that_fails_costs_a_checkpoint_at_most(place: Path, whole: Outcome) -> None:
    assert_went_on(place, errors("failing", telling(whole, of_a_save(whole))))


@pytest.mark.long
def test_a_write_that_fails_on_the_second_rank_is_known_to_both(place: Path) -> None:
    """The second rank does nothing to files but to write its part of each checkpoint."""
    trials = [Trial(f"second-{kind}", kind=kind, at=30, victim=1, ranks=2) for kind in ERRORS]
    for trial, outcome in zip(trials, run_trials(place, trials), strict=True):
        assert outcome.done[trial.at - 1].startswith("write checkpoints/"), trial
        assert outcome.codes == [0, 0], outcome.said
        assert outcome.said.count("COULD NOT SAVE, the run goes on") == 1, outcome.said
        assert "rank 1: [Errno" in outcome.said
        assert (outcome.complete[-1], outcome.damaged) == (STEPS, [])


@pytest.mark.long
def test_a_disk_that_stays_full_leaves_the_last_good_checkpoint(place: Path, whole: Outcome) -> None:
    """Nothing can be written any more, not even how the run ended; on another day it goes on."""
    numbers = telling(whole, of_a_save(whole))[::4]
    trials = [trial for number in numbers for trial in errors(f"full-{number}", [number], count=10**6)]
    for trial, outcome in zip(trials, run_trials(place, trials), strict=True):
        assert "No space left on device" in outcome.said
        assert_survived(place, trial, outcome, code=1)
