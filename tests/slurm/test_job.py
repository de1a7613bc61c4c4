"""job.sh reacts to every way in which a start can end. No cluster: Slurm and the ranks are stubs."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.launching import REPOSITORY

# Slurm reports the job as RUNNING unless STATE is set, and the ranks do what ACT says. `$$` is the batch script.
STUBS = """
source "$SOPDIST_HOME/launch/slurm/job.sh"
python() { echo "$RUN"; }
squeue() { echo "${STATE:-RUNNING}"; }
scontrol() { :; }
sleep() { command sleep 0.02; }
launch_ranks() { eval "$ACT"; }
train demo
"""
LOST = "exit 137"
STOP_REQUESTED = "kill -USR1 $$; until [[ -e $RUN/STOP ]]; do sleep 1; done; "
REQUEUED = "; requeueing the job"
GIVEN_UP = "starts in a row without a new checkpoint (SOPDIST_MAX_RESTARTS)"


@dataclass
class Job:
    """A job that can be started several times."""

    run: Path
    restarts: int = 0

    def start(self, act: str, **more: str) -> str:
        """Start the job and return the last message of the script, without the name of the job."""
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SOPDIST_"))}
        environ |= {"SOPDIST_HOME": str(REPOSITORY), "RUN": str(self.run), "ACT": act, "SLURM_JOB_ID": "7"}
        environ |= {"SLURM_JOB_NODELIST": "n1", "SLURM_RESTART_COUNT": str(self.restarts)} | more
        ended = subprocess.run(["bash", "-c", STUBS], env=environ, capture_output=True, text=True, timeout=60)
        self.restarts += 1
        return ended.stderr.splitlines()[-1].removeprefix("sopdist: job 7: ")

    def save(self, step: int) -> None:
        folder = self.run / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "complete").touch()

    def saves(self, step: int, then: str) -> str:
        """Shell code for ranks that save a step, then do something else."""
        folder = self.run / "checkpoints" / f"step-{step:08d}"
        return f"mkdir -p {folder}; touch {folder}/complete; {then}"

    def summary(self, status: str) -> str:
        """Shell code for ranks that write a summary and exit with code 75."""
        text = json.dumps({"finished": False, "exit": status}, indent=1)
        return f"echo '{text}' >{self.run}/summary.json; exit 75"


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path / "run")


def test_a_job_may_lose_ranks_three_times_in_a_row_no_matter_how_often_it_was_requeued_before(job: Job) -> None:
    for step in range(4):
        act = job.saves(step, STOP_REQUESTED + job.summary("preempted"))
        assert job.start(act).endswith(f"has stopped and saved a checkpoint{REQUEUED}")
    for _ in range(3):
        assert job.start(LOST) == f"a rank was lost (exit code 137){REQUEUED}"
    assert job.start(LOST).endswith(f"giving up after 4 {GIVEN_UP}")


def test_a_new_checkpoint_resets_the_count(job: Job) -> None:
    for _ in range(3):
        assert job.start(LOST).endswith(REQUEUED)
    assert job.start(job.saves(99_999_999, LOST)).endswith(REQUEUED)
    for _ in range(3):
        assert job.start(LOST).endswith(REQUEUED)
    job.save(100_000_000)  # by a start whose script was lost with its node
    for _ in range(3):
        assert job.start(LOST).endswith(REQUEUED)
    (job.run / "checkpoints" / "step-00000005.damaged").mkdir()
    (job.run / "checkpoints" / "step-00000005.damaged" / "complete").touch()
    assert job.start(LOST).endswith(GIVEN_UP)


@pytest.mark.parametrize("requested", ["", STOP_REQUESTED])
def test_a_run_that_can_never_save_is_not_requeued_forever(job: Job, requested: str) -> None:
    job.run.mkdir()
    for _ in range(3):
        ends = job.start(requested + job.summary("preempted, not saved"))
        assert ends.endswith(f"has stopped, but its checkpoint could not be saved{REQUEUED}")
    assert job.start(requested + job.summary("preempted, not saved")).endswith(GIVEN_UP)


def test_a_run_whose_time_limit_is_too_short_to_save_is_not_requeued_forever(job: Job) -> None:
    job.run.mkdir()
    for _ in range(3):
        assert job.start(STOP_REQUESTED + "exit 1").endswith(f"if there is one{REQUEUED}")
    assert job.start(STOP_REQUESTED + "exit 1").endswith(GIVEN_UP)


def test_starts_ended_by_slurm_do_not_count_and_a_new_job_starts_counting_from_zero(job: Job) -> None:
    for _ in range(5):
        ends = job.start("kill -TERM $$; exit 143", STATE="COMPLETING")
        assert ends.endswith("the job is not requeued here, Slurm has ended it (COMPLETING)")
    for _ in range(3):
        assert job.start(LOST).endswith(REQUEUED)
    job.restarts = 0
    assert job.start(LOST).endswith(REQUEUED)


@pytest.mark.parametrize(("number", "state"), [("USR1", "RUNNING"), ("TERM", "CANCELLED")])
def test_a_run_that_has_stopped_finds_no_stop_request_when_it_resumes(job: Job, number: str, state: str) -> None:
    """It removes the file, and takes a while to exit."""
    job.run.mkdir()
    requested = STOP_REQUESTED.replace("USR1", number) + "rm $RUN/STOP; until [[ -e $RUN/STOP ]]; do sleep 1; done; "
    job.start(requested + job.summary("preempted"), STATE=state)
    assert not (job.run / "STOP").exists()


def test_if_the_count_cannot_be_written_all_restarts_count(job: Job) -> None:
    (job.run / ".starts-without-progress.part").mkdir(parents=True)
    for _ in range(3):
        assert job.start(LOST).endswith(REQUEUED)
    assert job.start(LOST).endswith(GIVEN_UP)
