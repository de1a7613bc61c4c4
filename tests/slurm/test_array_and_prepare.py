"""array.sbatch and prepare.sbatch on a real cluster: each task does its part, or reports that there is none."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import yaml

from sopdist.cli import main
from sopdist.data.manifest import read_manifest
from tests.support.slurm_cluster import Cluster
from tests.support.slurm_jobs import SCRIPTS, SECONDS, overrides, summary_of, wait_for_steps

pytestmark = pytest.mark.long
SWEEP = {"SOPDIST_LEVELS": "0.2 0.4", "SOPDIST_SEEDS": "0 7"}


def test_a_sweep_trains_each_level_with_each_seed_and_requeues_only_the_preempted_task(
    slurm: Cluster, digits: Path, tmp_path: Path
) -> None:
    command = ["labels", "noise", str(digits / "train"), "symmetric", "--rate", "0.2", "--seed", "7"]
    assert main(command) == 0
    keys = overrides(digits, "engine.kind=auto", "run.name=sweep", "train.epochs=40")
    job = slurm.submit(SCRIPTS / "array.sbatch", ["demo", *keys], ["--array=1-2"], tmp_path, **SWEEP)
    runs = {  # tasks 0 to 3: (0.2, 0), (0.2, 7), (0.4, 0), (0.4, 7)
        1: tmp_path / "runs" / "sweep-sym-0.2-seed7",
        2: tmp_path / "runs" / "sweep-sym-0.4-seed0",
    }
    slurm.wait_for(lambda: len(slurm.facts_of(job)) == 2, job, SECONDS)
    # The task whose job id is also that of the array.
    (unlucky,) = (int(facts["ArrayTaskId"]) for facts in slurm.facts_of(job) if facts["JobId"] == str(job))
    wait_for_steps(slurm, job, runs[unlucky])
    rank = slurm.ranks_of(job)[0]
    os.kill(rank, signal.SIGSTOP)  # so that it cannot finish before the request
    slurm.cancel("--batch", "--signal=USR1", f"{job}_{unlucky}")
    slurm.wait_for((runs[unlucky] / "STOP").exists, job, SECONDS)
    os.kill(rank, signal.SIGCONT)
    slurm.wait(job, "COMPLETED", SECONDS)
    assert {int(facts["ArrayTaskId"]): facts["Restarts"] for facts in slurm.facts_of(job)} == {
        unlucky: "1",
        3 - unlucky: "0",
    }
    assert set((tmp_path / "runs").iterdir()) == set(runs.values())
    for run, level, seed in ((runs[1], "0.2", 7), (runs[2], "0.4", 0)):
        config = yaml.safe_load((run / "config.yaml").read_text())
        assert (config["data"]["labels"], config["run"]["seed"]) == (f"sym-{level}-seed{seed}", seed)
        assert summary_of(run)["finished"]


def test_a_task_without_a_level_reports_the_number_of_tasks(slurm: Cluster, tmp_path: Path) -> None:
    job = slurm.submit(SCRIPTS / "array.sbatch", ["demo"], ["--array=4"], tmp_path, **SWEEP)
    slurm.wait(job, "FAILED", SECONDS)
    assert "2 levels x 2 seeds = 4 tasks: submit with --array=0-3" in slurm.output_of(job)


def test_each_split_is_prepared_by_its_own_task(slurm: Cluster, digits: Path, tmp_path: Path) -> None:
    options = ["--array=0-1", "--cpus-per-task=2"]
    arguments = ["digits", "--out", "shards"]
    splits = "train test"
    job = slurm.submit(SCRIPTS / "prepare.sbatch", arguments, options, tmp_path, SOPDIST_SPLITS=splits)
    slurm.wait(job, "COMPLETED", SECONDS)
    for split in splits.split():  # the same bytes as from one process
        assert read_manifest(tmp_path / "shards" / split) == read_manifest(digits / split)
        assert f"prepare digits --workers 2 --out shards --splits {split}" in slurm.output_of(job)
        assert main(["verify", str(tmp_path / "shards" / split)]) == 0


# The first start waits for the signal: preparing digits would be done before it arrives.
WAIT_ONCE = """
import pathlib, sys, time
if "prepare" in sys.orig_argv and not pathlib.Path("waits").exists():
    pathlib.Path("waits").touch()
    time.sleep(100)
"""


def test_preparing_all_splits_needs_no_array_and_resumes_after_the_time_limit(
    slurm: Cluster, digits: Path, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(WAIT_ONCE)
    arguments, options = ["digits", "--out", "shards", "--overwrite"], [f"--export=ALL,PYTHONPATH={tmp_path}"]
    job = slurm.submit(SCRIPTS / "prepare.sbatch", arguments, options, tmp_path)
    slurm.wait_for((tmp_path / "waits").exists, job, SECONDS)
    slurm.cancel("--batch", "--signal=USR1", str(job))
    slurm.wait(job, "COMPLETED", SECONDS)
    assert slurm.facts_of(job)[0]["Restarts"] == "1"
    once = f"python -m sopdist prepare digits --workers 1 --out shards --overwrite-once job-{job}"
    assert f"start 1: {once} --overwrite\n" in slurm.output_of(job)
    assert f"start 2: {once}\n" in slurm.output_of(job)
    for split in ("train", "test"):
        assert read_manifest(tmp_path / "shards" / split) == read_manifest(digits / split)


def test_a_job_for_a_missing_data_set_fails_and_is_not_requeued(slurm: Cluster, tmp_path: Path) -> None:
    arguments = ["cifar10", "--root", "nowhere", "--out", "shards"]
    job = slurm.submit(SCRIPTS / "prepare.sbatch", arguments, [], tmp_path)
    slurm.wait(job, "FAILED", SECONDS)
    assert slurm.facts_of(job)[0]["Restarts"] == "0"
    assert "--root nowhere: no such folder" in slurm.output_of(job)
