"""A file operation that fails costs at most a checkpoint, not the run. A disk that stays full ends the run, which can
be resumed from the last good checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.crash_trials import ERRORS, OLDER, Reference, assert_survived, disk_errors, reference_of
from tests.support.crashing import STEPS, Trial, TrialRunner
from tests.support.exactness import deterministic_metrics


def assert_continued(runner: TrialRunner, trials: Sequence[Trial]) -> None:
    """The run ended as without the fault, and reported a failed save if the operation mattered to the checkpoint."""
    for trial, outcome in zip(trials, runner.run(trials), strict=True):
        message = f"{trial} {outcome.operations[trial.at - 1 :][:1]}\n{outcome.log[-3000:]}"
        assert (outcome.codes, outcome.resumed) == ([0] * trial.ranks, [0] * trial.ranks), message
        assert (outcome.complete[-1], outcome.damaged) == (STEPS, []), message
        operation = outcome.operations[trial.at - 1]  # removing an older one and writing a line can be done later
        failed = OLDER not in operation and operation not in ("open metrics.jsonl", "write metrics.jsonl")
        assert outcome.log.count("checkpoint could not be saved; training continues") == failed, message
        run = runner.run_of(trial)
        assert json.loads((run / "summary.json").read_text())["failed_saves"] == failed, message
        assert results_of(run) == results_of(reference_of(runner, trial)), message


def results_of(run: Path) -> list[dict[str, object]]:
    return [{key: value for key, value in line.items() if key != "failed_saves"} for line in deterministic_metrics(run)]


def test_an_operation_that_fails_costs_at_most_a_checkpoint(
    crash_runner: TrialRunner, crash_reference: Reference
) -> None:
    assert_continued(crash_runner, disk_errors("quick-failing", crash_reference.distinct[::5]))


@pytest.mark.long
@pytest.mark.parametrize("part", range(3))
def test_any_operation_of_a_save_that_fails_costs_at_most_a_checkpoint(
    crash_runner: TrialRunner, crash_reference: Reference, part: int
) -> None:
    trials = disk_errors("failing", crash_reference.distinct)[part::3]
    assert len(trials) >= 10
    assert_continued(crash_runner, trials)


@pytest.mark.long
def test_a_write_that_fails_on_the_second_rank_fails_the_save_on_both(crash_runner: TrialRunner) -> None:
    """The second rank's only file operations write its part of each checkpoint."""
    trials = [Trial(f"second-{kind}", kind=kind, at=30, victim=1, ranks=2) for kind in ERRORS]
    for trial, outcome in zip(trials, crash_runner.run(trials), strict=True):
        assert outcome.operations[trial.at - 1].startswith("write checkpoints/"), trial
        assert outcome.codes == [0, 0], outcome.log
        assert outcome.log.count("checkpoint could not be saved; training continues") == 1, outcome.log
        assert "rank 1: [Errno" in outcome.log
        assert (outcome.complete[-1], outcome.damaged) == (STEPS, [])


@pytest.mark.long
def test_a_disk_that_stays_full_leaves_the_last_good_checkpoint(
    crash_runner: TrialRunner, crash_reference: Reference
) -> None:
    """Nothing can be written any more, not even how the run ended. When there is space again, the run resumes."""
    numbers = crash_reference.distinct[::4]
    trials = [trial for number in numbers for trial in disk_errors(f"full-{number}", [number], count=10**6)]
    for trial, outcome in zip(trials, crash_runner.run(trials), strict=True):
        assert "No space left on device" in outcome.log
        assert_survived(crash_runner, trial, outcome, code=1)
