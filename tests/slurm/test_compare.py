"""compare.sbatch on a real cluster: each task trains its run, and the table is the same as without Slurm."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from sopdist.cli import main
from sopdist.compare import running
from tests.compare.conftest import train_here
from tests.support.slurm_cluster import Cluster
from tests.support.slurm_jobs import SCRIPTS, SECONDS, overrides, summary_of

pytestmark = pytest.mark.long


def accuracies(table: Path) -> dict[str, str]:
    with table.open() as file:
        return {row["method"]: row["test"] for row in csv.DictReader(file)}


def test_each_task_trains_its_run_and_the_table_is_that_of_the_full_command(
    slurm: Cluster, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    keys = overrides(digits, "engine.kind=auto", "train.epochs=3", "evaluate.every=1")
    comparison = ["--cfg", "demo", "--methods", "ce,gce:q=0.5", "--seeds", "1", *keys]
    assert main(["compare", *comparison, "--out", "slurm", "--list"]) == 0
    assert capsys.readouterr().out == "2\n"
    job = slurm.submit(SCRIPTS / "compare.sbatch", [*comparison, "--out", "slurm"], ["--array=0-1"], tmp_path)
    slurm.wait(job, "COMPLETED", SECONDS)
    for name in ("ce-sym-0.4-seed0-seed0", "gce-q-0.5-sym-0.4-seed0-seed0"):
        assert summary_of(tmp_path / "slurm" / "runs" / name)["finished"]
    assert main(["compare", *comparison, "--out", "slurm", "--table"]) == 0
    monkeypatch.setattr(running, "train_process", train_here)
    assert main(["compare", *comparison, "--out", "here"]) == 0
    assert accuracies(tmp_path / "slurm" / "table.csv") == accuracies(tmp_path / "here" / "table.csv")


def test_a_task_without_a_run_reports_the_number_of_runs(slurm: Cluster, digits: Path, tmp_path: Path) -> None:
    arguments = ["--cfg", "demo", "--methods", "ce", "--seeds", "2", *overrides(digits)]
    job = slurm.submit(SCRIPTS / "compare.sbatch", arguments, ["--array=2"], tmp_path)
    slurm.wait(job, "FAILED", SECONDS)
    assert "--task 2: must be from 0 to 1; there are 2 runs" in slurm.output_of(job)
