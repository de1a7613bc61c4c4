"""The run that the jobs of the Slurm tests train, and its progress."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.launching import REPOSITORY
from tests.support.slurm_cluster import Cluster

SCRIPTS = REPOSITORY / "launch" / "slurm"
TWO_NODES = ("--nodes=2", "--ntasks-per-node=1")
SECONDS = 150  # starting is slow on a busy machine
EPOCHS, STEPS = 12, 276


def overrides(digits: Path, *more: str) -> list[str]:
    """Overrides of the config demo: a few seconds of training, every loss logged; the run is in `runs`."""
    return [
        f"data.root={digits}", "engine.kind=ddp", "engine.threads=1", "data.threads=1", "log.wandb=off", "log.every=1",
        f"train.epochs={EPOCHS}", f"evaluate.every={EPOCHS}", *more,
    ]  # fmt: skip


def train(slurm: Cluster, digits: Path, folder: Path, *more: str, options: tuple[str, ...] = (), **env: str) -> int:
    """Submit train.sbatch on two nodes and return the job id. The run is `folder/runs/run`."""
    script = SCRIPTS / "train.sbatch"
    return slurm.submit(
        script, ["demo", *overrides(digits, "run.name=run", *more)], [*TWO_NODES, *options], folder, **env
    )


def wait_for_steps(slurm: Cluster, job: int, run: Path, steps: int = 10) -> None:
    """Wait until the run has logged this many steps."""
    path = run / "metrics.jsonl"
    slurm.wait_for(lambda: path.exists() and path.read_text().count('"kind": "train"') >= steps, job, SECONDS)


def summary_of(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return found


def restarts_of(slurm: Cluster, job: int) -> int:
    return int(slurm.facts_of(job)[0]["Restarts"])
