"""train.sbatch on a real cluster of two nodes: an interrupted run ends with the result of an uninterrupted one."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.records import losses_of
from tests.support.slurm_cluster import Cluster
from tests.support.slurm_jobs import (
    SCRIPTS,
    SECONDS,
    STEPS,
    TWO_NODES,
    overrides,
    restarts_of,
    summary_of,
    train,
    wait_for_steps,
)

pytestmark = pytest.mark.long


def check_finished(run: Path, uninterrupted: list[float]) -> None:
    """Every step exactly once, each with the loss of an uninterrupted run, bit for bit."""
    summary = summary_of(run)
    assert (summary["finished"], summary["exit"], summary["ranks"]) == (True, "finished", 2)
    assert losses_of(run) == uninterrupted
    assert len(uninterrupted) == STEPS
    assert not (run / "STOP").exists()


def test_two_nodes_train_a_run_that_is_named_after_its_job(
    slurm: Cluster, digits: Path, tmp_path: Path, uninterrupted: list[float]
) -> None:
    job = slurm.submit(SCRIPTS / "train.sbatch", ["demo", *overrides(digits)], TWO_NODES, tmp_path)
    slurm.wait(job, "COMPLETED", SECONDS)
    check_finished(tmp_path / "runs" / f"demo-{job}", uninterrupted)
    assert restarts_of(slurm, job) == 0
    assert "2 ranks on n[1-2], launcher srun" in slurm.output_of(job)


def test_a_job_that_slurm_requeues_gives_the_same_result(
    slurm: Cluster, digits: Path, tmp_path: Path, uninterrupted: list[float]
) -> None:
    job, run = train(slurm, digits, tmp_path), tmp_path / "runs" / "run"
    wait_for_steps(slurm, job, run)
    slurm.control("requeue", str(job))
    slurm.wait_for(lambda: summary_of(run)["exit"] == "preempted", job, 60)
    slurm.wait(job, "COMPLETED", SECONDS)
    assert restarts_of(slurm, job) == 1  # by Slurm, not by the script as well
    check_finished(run, uninterrupted)


def test_a_job_that_reaches_its_time_limit_is_requeued_and_gives_the_same_result(
    slurm: Cluster, digits: Path, tmp_path: Path, uninterrupted: list[float]
) -> None:
    job = train(slurm, digits, tmp_path, options=("--time=30", "--signal=B:USR1@60"))
    run = tmp_path / "runs" / "run"
    wait_for_steps(slurm, job, run)
    # Slurm checks time limits twice a minute. The ranks are suspended until then, so that they cannot finish before.
    ranks = slurm.ranks_of(job)
    assert len(ranks) == 2
    for pid in ranks.values():
        os.kill(pid, signal.SIGSTOP)
    slurm.control("update", f"jobid={job}", "timelimit=1")
    slurm.wait_for(lambda: "received SIGUSR1" in slurm.output_of(job), job, 90)
    for pid in ranks.values():
        os.kill(pid, signal.SIGCONT)
    slurm.wait_for(lambda: "has stopped and saved a checkpoint; requeueing the job" in slurm.output_of(job), job, 60)
    slurm.control("update", f"jobid={job}", "timelimit=30")
    slurm.wait(job, "COMPLETED", SECONDS)
    assert restarts_of(slurm, job) == 1
    check_finished(run, uninterrupted)


def test_a_preempted_run_of_torchrun_under_srun_gives_the_same_result(
    slurm: Cluster, digits: Path, tmp_path: Path, uninterrupted: list[float]
) -> None:
    job, run = train(slurm, digits, tmp_path, SOPDIST_LAUNCHER="torchrun"), tmp_path / "runs" / "run"
    wait_for_steps(slurm, job, run)
    slurm.cancel("--batch", "--signal=USR1", str(job))  # as Slurm does before the time limit
    slurm.wait(job, "COMPLETED", SECONDS)
    assert restarts_of(slurm, job) == 1
    assert "2 ranks on n[1-2], launcher torchrun" in slurm.output_of(job)
    check_finished(run, uninterrupted)


def test_a_preempted_run_of_the_slurm_runner_of_deepspeed_gives_the_same_result(
    slurm: Cluster, digits: Path, tmp_path: Path, uninterrupted: list[float]
) -> None:
    job, run = train(slurm, digits, tmp_path, SOPDIST_LAUNCHER="deepspeed"), tmp_path / "runs" / "run"
    wait_for_steps(slurm, job, run)
    slurm.cancel("--batch", "--signal=USR1", str(job))
    slurm.wait(job, "COMPLETED", SECONDS)
    assert restarts_of(slurm, job) == 1
    assert "cmd = srun -n 2" in slurm.output_of(job)
    check_finished(run, uninterrupted)


def test_a_run_that_loses_a_rank_resumes_from_its_checkpoint(
    slurm: Cluster, digits: Path, tmp_path: Path, uninterrupted: list[float]
) -> None:
    job, run = train(slurm, digits, tmp_path), tmp_path / "runs" / "run"
    wait_for_steps(slurm, job, run, steps=60)
    os.kill(slurm.ranks_of(job)[1], signal.SIGKILL)
    slurm.wait(job, "COMPLETED", SECONDS)
    assert restarts_of(slurm, job) == 1
    assert "a rank was lost (exit code 137); requeueing the job" in slurm.output_of(job)
    check_finished(run, uninterrupted)


def test_a_job_that_loses_ranks_without_progress_gives_up(slurm: Cluster, digits: Path, tmp_path: Path) -> None:
    job = train(slurm, digits, tmp_path, "checkpoint.every=0", SOPDIST_MAX_RESTARTS="0")
    wait_for_steps(slurm, job, tmp_path / "runs" / "run")
    os.kill(slurm.ranks_of(job)[0], signal.SIGKILL)
    slurm.wait(job, "FAILED", SECONDS)
    assert restarts_of(slurm, job) == 0
    assert "giving up after 1 starts in a row without a new checkpoint (SOPDIST_MAX_RESTARTS)" in slurm.output_of(job)


def test_a_cancelled_job_saves_and_is_not_requeued(slurm: Cluster, digits: Path, tmp_path: Path) -> None:
    job, run = train(slurm, digits, tmp_path), tmp_path / "runs" / "run"
    wait_for_steps(slurm, job, run)
    slurm.cancel(str(job))
    slurm.wait(job, "CANCELLED", 60)
    slurm.wait_for(lambda: summary_of(run)["exit"] == "preempted", job, 60)
    assert any((run / "checkpoints").iterdir())
    assert restarts_of(slurm, job) == 0
    assert "requeueing the job" not in slurm.output_of(job)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "run.name=run", "optim.speed=9"], "optim.speed: no such key"),  # found before ranks are started
        (["demo", "run.name=run", "data.root=nowhere"], "has failed (exit code 1): the job is not requeued"),
        (["optim.lr=0.1"], "no config given"),
    ],
)
def test_a_job_that_fails_is_not_requeued(slurm: Cluster, tmp_path: Path, arguments: list[str], message: str) -> None:
    job = slurm.submit(SCRIPTS / "train.sbatch", arguments, TWO_NODES, tmp_path)
    slurm.wait(job, "FAILED", SECONDS)
    assert restarts_of(slurm, job) == 0
    assert message in slurm.output_of(job)
