"""train.sbatch on a real cluster of two nodes: whatever ends a job, the run ends as if nothing had happened."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.records import losses_of
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import (
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
    """Every step once, each with the loss that it has without interruption, to the bit."""
    summary = summary_of(run)
    assert (summary["finished"], summary["exit"], summary["ranks"]) == (True, "finished", 2)
    assert losses_of(run) == uninterrupted
    assert len(uninterrupted) == STEPS
    assert not (run / "STOP").exists()


def test_two_nodes_train_a_run_that_is_called_after_its_job(
    slurm: Cluster, digits: Path, tmp_path: Path, uninterrupted: list[float]
) -> None:
    job = slurm.submit(SCRIPTS / "train.sbatch", ["demo", *overrides(digits)], TWO_NODES, tmp_path)
    slurm.wait(job, "COMPLETED", SECONDS)
    check_finished(tmp_path / "runs" / f"demo-{job}", uninterrupted)
    assert restarts_of(slurm, job) == 0
    assert "ranks: 2 on n[1-2] by srun" in slurm.output_of(job)


def test_a_job_that_slurm_requeues_ends_with_the_same_result(
    slurm: Cluster, digits: Path, tmp_path: Path, uninterrupted: list[float]
) -> None:
    job, run = train(slurm, digits, tmp_path), tmp_path / "runs" / "run"
    wait_for_steps(slurm, job, run)
    slurm.control("requeue", str(job))
    slurm.wait_for(lambda: summary_of(run)["exit"] == "preempted", job, 60)
    slurm.wait(job, "COMPLETED", SECONDS)
    assert restarts_of(slurm, job) == 1  # by Slurm, and not by the script as well
    check_finished(run, uninterrupted)


def test_a_job_at_its_time_limit_ends_with_the_same_result_after_another_start(
    slurm: Cluster, digits: Path, tmp_path: Path, uninterrupted: list[float]
) -> None:
    job = train(slurm, digits, tmp_path, options=("--time=30", "--signal=B:USR1@60"))
    run = tmp_path / "runs" / "run"
    wait_for_steps(slurm, job, run)
    # Slurm looks at time limits twice a minute. Until then the ranks sleep, so that no machine is too fast for it.
    ranks = slurm.ranks_of(job)
    assert len(ranks) == 2
    for pid in ranks.values():
        os.kill(pid, signal.SIGSTOP)
    slurm.control("update", f"jobid={job}", "timelimit=1")
    slurm.wait_for(lambda: "got SIGUSR1" in slurm.output_of(job), job, 90)
    for pid in ranks.values():
        os.kill(pid, signal.SIGCONT)
    slurm.wait_for(lambda: "has stopped and is saved; is requeued" in slurm.output_of(job), job, 60)
    slurm.control("update", f"jobid={job}", "timelimit=30")
    slurm.wait(job, "COMPLETED", SECONDS)
    assert restarts_of(slurm, job) == 1
    check_finished(run, uninterrupted)


def test_torchrun_under_srun_is_preempted_and_ends_with_the_same_result(
    slurm: Cluster, digits: Path, tmp_path: Path, uninterrupted: list[float]
) -> None:
    job, run = train(slurm, digits, tmp_path, SOPDIST_LAUNCHER="torchrun"), tmp_path / "runs" / "run"
    wait_for_steps(slurm, job, run)
    slurm.cancel("--batch", "--signal=USR1", str(job))  # what Slurm does before the time limit
    slurm.wait(job, "COMPLETED", SECONDS)
    assert restarts_of(slurm, job) == 1
    assert "ranks: 2 on n[1-2] by torchrun" in slurm.output_of(job)
    check_finished(run, uninterrupted)


def test_the_slurm_runner_of_deepspeed_is_preempted_and_ends_with_the_same_result(
    slurm: Cluster, digits: Path, tmp_path: Path, uninterrupted: list[float]
) -> None:
    job, run = train(slurm, digits, tmp_path, SOPDIST_LAUNCHER="deepspeed"), tmp_path / "runs" / "run"
    wait_for_steps(slurm, job, run)
    slurm.cancel("--batch", "--signal=USR1", str(job))
    slurm.wait(job, "COMPLETED", SECONDS)
    assert restarts_of(slurm, job) == 1
    assert "cmd = srun -n 2" in slurm.output_of(job)
    check_finished(run, uninterrupted)


def test_a_run_that_loses_a_rank_goes_on_from_its_checkpoint(
    slurm: Cluster, digits: Path, tmp_path: Path, uninterrupted: list[float]
) -> None:
    job, run = train(slurm, digits, tmp_path), tmp_path / "runs" / "run"
    wait_for_steps(slurm, job, run, steps=60)
    os.kill(slurm.ranks_of(job)[1], signal.SIGKILL)
    slurm.wait(job, "COMPLETED", SECONDS)
    assert restarts_of(slurm, job) == 1
    assert "a rank was lost (exit code 137); is requeued" in slurm.output_of(job)
    check_finished(run, uninterrupted)


def test_a_run_that_loses_ranks_without_progress_is_given_up(slurm: Cluster, digits: Path, tmp_path: Path) -> None:
    job = train(slurm, digits, tmp_path, "checkpoint.every=0", SOPDIST_MAX_RESTARTS="0")
    wait_for_steps(slurm, job, tmp_path / "runs" / "run")
    os.kill(slurm.ranks_of(job)[0], signal.SIGKILL)
    slurm.wait(job, "FAILED", SECONDS)
    assert restarts_of(slurm, job) == 0
    assert "starts in a row without a new checkpoint: 1 (SOPDIST_MAX_RESTARTS): gives up" in slurm.output_of(job)


def test_a_cancelled_job_saves_and_does_not_come_back(slurm: Cluster, digits: Path, tmp_path: Path) -> None:
    job, run = train(slurm, digits, tmp_path), tmp_path / "runs" / "run"
    wait_for_steps(slurm, job, run)
    slurm.cancel(str(job))
    slurm.wait(job, "CANCELLED", 60)
    slurm.wait_for(lambda: summary_of(run)["exit"] == "preempted", job, 60)
    assert any((run / "checkpoints").iterdir())
    assert restarts_of(slurm, job) == 0
    assert "is requeued" not in slurm.output_of(job)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["demo", "run.name=run", "optim.speed=9"], "optim.speed: no such key"),  # found before any rank is started
        (["demo", "run.name=run", "data.root=nowhere"], "has failed (exit code 1): is not requeued"),
        (["optim.lr=0.1"], "which config?"),
    ],
)
def test_a_job_that_fails_is_not_requeued(slurm: Cluster, tmp_path: Path, arguments: list[str], says: str) -> None:
    job = slurm.submit(SCRIPTS / "train.sbatch", arguments, TWO_NODES, tmp_path)
    slurm.wait(job, "FAILED", SECONDS)
    assert restarts_of(slurm, job) == 0
    assert says in slurm.output_of(job)
