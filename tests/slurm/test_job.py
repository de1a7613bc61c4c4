"""What job.sh makes of each way in which a start can end, without a cluster: Slurm and the ranks are stand-ins."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.train.launching import REPOSITORY

# Slurm says that the job runs, unless STATE is set, and the ranks do what ACT says. `$$` is the batch script.
STAND_INS = """
source "$SOPDIST_HOME/launch/slurm/job.sh"
python() { echo "$RUN"; }
squeue() { echo "${STATE:-RUNNING}"; }
scontrol() { :; }
sleep() { command sleep 0.02; }
launch_ranks() { eval "$ACT"; }
train demo
"""
LOST = "exit 137"
ASKED = "kill -USR1 $$; until [[ -e $RUN/STOP ]]; do sleep 1; done; "


@dataclass
class Job:
    """A job that is started again and again."""

    run: Path
    restarts: int = 0

    def start(self, act: str, **more: str) -> str:
        """Start it; how the script ended: what it said last, without the name of the job."""
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SOPDIST_"))}
        environ |= {"SOPDIST_HOME": str(REPOSITORY), "RUN": str(self.run), "ACT": act, "SLURM_JOB_ID": "7"}
        environ |= {"SLURM_JOB_NODELIST": "n1", "SLURM_RESTART_COUNT": str(self.restarts)} | more
        ended = subprocess.run(["bash", "-c", STAND_INS], env=environ, capture_output=True, text=True, timeout=60)
        self.restarts += 1
        return ended.stderr.splitlines()[-1].removeprefix("sopdist: job 7: ")

    def save(self, step: int) -> None:
        folder = self.run / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "complete").touch()

    def saves(self, step: int, ending: str) -> str:
        """What ranks do that save a step and end so."""
        folder = self.run / "checkpoints" / f"step-{step:08d}"
        return f"mkdir -p {folder}; touch {folder}/complete; {ending}"

    def summary(self, ending: str) -> str:
        """What ranks do that write a summary."""
        text = json.dumps({"finished": False, "exit": ending}, indent=1)
        return f"echo '{text}' >{self.run}/summary.json; exit 75"


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path / "run")


def test_a_lost_rank_is_forgiven_three_times_in_a_row_however_often_the_job_was_requeued_before(job: Job) -> None:
    for step in range(4):
        assert job.start(job.saves(step, ASKED + job.summary("preempted"))).endswith("is saved; is requeued")
    for _ in range(3):
        assert job.start(LOST) == "a rank was lost (exit code 137); is requeued"
    assert job.start(LOST).endswith("starts in a row without a new checkpoint: 4 (SOPDIST_MAX_RESTARTS): gives up")


def test_a_new_checkpoint_ends_the_row(job: Job) -> None:
    for _ in range(3):
        assert job.start(LOST).endswith("is requeued")
    assert job.start(job.saves(99_999_999, LOST)).endswith("is requeued")
    for _ in range(3):
        assert job.start(LOST).endswith("is requeued")
    job.save(100_000_000)  # by a start whose script was lost with its node
    for _ in range(3):
        assert job.start(LOST).endswith("is requeued")
    (job.run / "checkpoints" / "step-00000005.damaged").mkdir()
    (job.run / "checkpoints" / "step-00000005.damaged" / "complete").touch()
    assert job.start(LOST).endswith("gives up")


@pytest.mark.parametrize("asked", ["", ASKED])
def test_a_run_that_can_never_save_is_not_requeued_for_ever(job: Job, asked: str) -> None:
    job.run.mkdir()
    for _ in range(3):
        assert job.start(asked + job.summary("preempted, not saved")).endswith("COULD NOT SAVE; is requeued")
    assert job.start(asked + job.summary("preempted, not saved")).endswith("gives up")


def test_a_run_whose_time_is_too_short_to_save_anything_is_not_requeued_for_ever(job: Job) -> None:
    job.run.mkdir()
    for _ in range(3):
        assert job.start(ASKED + "exit 1").endswith("if it has one; is requeued")
    assert job.start(ASKED + "exit 1").endswith("gives up")


def test_what_slurm_ends_does_not_count_and_a_new_job_begins_to_count_anew(job: Job) -> None:
    for _ in range(5):
        ends = job.start("kill -TERM $$; exit 143", STATE="COMPLETING")
        assert ends.endswith("Slurm ends this job itself (COMPLETING)")
    for _ in range(3):
        assert job.start(LOST).endswith("is requeued")
    job.restarts = 0
    assert job.start(LOST).endswith("is requeued")


@pytest.mark.parametrize(("number", "state"), [("USR1", "RUNNING"), ("TERM", "CANCELLED")])
def test_a_run_that_has_obeyed_is_not_asked_again_when_it_goes_on(job: Job, number: str, state: str) -> None:
    """It removes the file, and takes a while to end."""
    job.run.mkdir()
    asked = ASKED.replace("USR1", number) + "rm $RUN/STOP; until [[ -e $RUN/STOP ]]; do sleep 1; done; "
    job.start(asked + job.summary("preempted"), STATE=state)
    assert not (job.run / "STOP").exists()


def test_where_the_count_cannot_be_written_all_restarts_count(job: Job) -> None:
    (job.run / ".starts-without-progress.part").mkdir(parents=True)
    for _ in range(3):
        assert job.start(LOST).endswith("is requeued")
    assert job.start(LOST).endswith("gives up")
