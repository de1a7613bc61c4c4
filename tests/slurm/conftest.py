"""A cluster for all tests of this folder, and what they compare its jobs with."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sopdist.train.place import LAUNCH_VARIABLES
from tests.e2e.conftest import digits
from tests.e2e.launchers import run
from tests.e2e.records import losses_of
from tests.slurm.cluster import Cluster, cluster, why_not
from tests.slurm.jobs import overrides

__all__ = ["digits"]


@pytest.fixture(scope="session")
def slurm() -> Iterator[Cluster]:
    """Two nodes of a real Slurm; skips where there cannot be one."""
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
    """The losses of two ranks that nobody interrupts, without Slurm."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    ended = run("torchrun", ["--cfg", "demo", *overrides(digits), "run.name=whole"], folder, ranks=2)
    assert ended.code == 0, ended.told
    return losses_of(folder / "runs" / "whole")
