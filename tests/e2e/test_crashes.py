"""A run that is killed during a save resumes from an intact checkpoint and ends as if nothing had happened.

It is killed between any two file operations of a save, in the middle of a write, and once more while it resumes. After
every crash: all complete checkpoints are intact, at most the steps since the previous save are lost, and the resumed
run ends with the metrics and weights of a run that never crashed, bit for bit.
"""

from __future__ import annotations

import pytest

from tests.support.crash_trials import Reference, crash, kills, kills_in_background
from tests.support.crashing import TrialRunner
from tests.support.file_faults import TORN


def test_a_run_killed_during_a_save_resumes_exactly(crash_runner: TrialRunner, crash_reference: Reference) -> None:
    numbers, writes = crash_reference.distinct, crash_reference.writes
    trials = [*kills("quick", numbers[::3]), *kills("quick-torn", writes[::2], TORN)]
    trials += [*kills_in_background("quick-random", 2, 400), *kills("quick-twice", numbers[8:9], again=12)]
    assert crash(crash_runner, trials) == len(trials)


@pytest.mark.long
@pytest.mark.parametrize("part", range(6))
def test_a_run_killed_between_any_two_operations_of_a_save_resumes_exactly(
    crash_runner: TrialRunner, crash_reference: Reference, part: int
) -> None:
    trials = kills("save", crash_reference.save)[part::6]
    assert crash(crash_runner, trials) == len(trials) >= 10


@pytest.mark.long
def test_a_run_killed_in_the_middle_of_a_write_resumes_exactly(
    crash_runner: TrialRunner, crash_reference: Reference
) -> None:
    writes = crash_reference.writes
    trials = kills("torn", [*writes, *(number + 5 for number in writes[:1])], TORN)
    assert crash(crash_runner, trials) == len(trials) >= 5


@pytest.mark.long
@pytest.mark.parametrize("part", range(2))
def test_a_run_killed_again_while_it_resumes_resumes_exactly(
    crash_runner: TrialRunner, crash_reference: Reference, part: int
) -> None:
    save = crash_reference.save
    trials = [kills(f"twice-{number}", [save[number]], again=number + 3)[0] for number in range(part, 20, 2)]
    assert crash(crash_runner, trials) == len(trials) == 10
