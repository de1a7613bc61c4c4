"""A run that is killed at any time, on one rank or two, resumes from an intact checkpoint and ends as if nothing had
happened. `assert_survived` says what that means."""

from __future__ import annotations

import pytest

from tests.support.crash_trials import Reference, crash, kills, kills_in_background, random_moments
from tests.support.crashing import TrialRunner

pytestmark = pytest.mark.long


@pytest.mark.parametrize("part", range(4))
def test_a_run_killed_at_any_operation_outside_a_save_resumes_exactly(
    crash_runner: TrialRunner, crash_reference: Reference, part: int
) -> None:
    numbers = crash_reference.others
    trials = kills("anywhere", numbers[:: len(numbers) // 40])[part::4]
    assert crash(crash_runner, trials) == len(trials) >= 10


@pytest.mark.usefixtures("crash_reference")
@pytest.mark.parametrize("part", range(5))
def test_a_run_killed_at_a_random_moment_resumes_exactly(crash_runner: TrialRunner, part: int) -> None:
    trials = random_moments("moment", 60, longest=0.02)[part::5]
    assert crash(crash_runner, trials) >= 7


@pytest.mark.usefixtures("crash_reference")
@pytest.mark.parametrize("part", range(2))
def test_a_run_killed_while_it_saves_in_the_background_resumes_exactly(crash_runner: TrialRunner, part: int) -> None:
    trials = kills_in_background("background", 25, 450)[part::2]
    assert crash(crash_runner, trials) == len(trials) >= 12


@pytest.mark.usefixtures("crash_reference")
@pytest.mark.parametrize(("name", "victim", "operations"), [("first-of-two", 0, 380), ("second-of-two", 1, 200)])
def test_two_ranks_of_which_one_is_killed_resume_exactly(
    crash_runner: TrialRunner, name: str, victim: int, operations: int
) -> None:
    trials = kills_in_background(name, 8, operations, ranks=2, victim=victim)
    assert crash(crash_runner, trials) == len(trials) == 8
