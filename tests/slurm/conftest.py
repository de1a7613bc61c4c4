"""A cluster for all tests in this folder, and the losses that its jobs must reproduce."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sopdist.train.distributed.launch_env import LAUNCH_VARIABLES
from tests.e2e.conftest import digits
from tests.support.launchers import run
from tests.support.records import losses_of
from tests.support.slurm_cluster import Cluster, cluster, why_not
from tests.support.slurm_jobs import overrides

__all__ = ["digits"]


@pytest.fixture(scope="session")
def slurm() -> Iterator[Cluster]:
    """Two nodes of a real Slurm. Tests skip where no cluster can be started."""
    reason = why_not()
    if reason:
        pytest.skip(f"a Slurm cluster on this machine {reason}")
    foreign = (*LAUNCH_VARIABLES, "TRITON_INTERPRET", "PYTHONPATH", "MASTER_ADDR", "MASTER_PORT")
    own = {name: value for name, value in os.environ.items() if name not in foreign and not name.startswith("SOPDIST_")}
    own |= {"SOPDIST_VENV": sys.prefix, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with cluster(own) as running:
        yield running


@pytest.fixture(scope="session")
def uninterrupted(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of two uninterrupted ranks, without Slurm."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    ended = run("torchrun", ["--cfg", "demo", *overrides(digits), "run.name=uninterrupted"], folder, ranks=2)
    assert ended.code == 0, ended.output
    return losses_of(folder / "runs" / "uninterrupted")
