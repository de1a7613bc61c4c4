"""Data for runs: digits with wrong labels, prepared as a user does it, and a tiny split for runs that crash."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sopdist.cli import main
from tests.support.crash_trials import Reference, run_reference
from tests.support.crashing import TrialRunner


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1,438 training and 359 test images of 8 x 8, with the label set sym-0.4-seed0: data.root of the config demo."""
    folder = tmp_path_factory.mktemp("shards") / "digits"
    assert main(["prepare", "digits", "--out", str(folder)]) == 0
    assert main(["labels", "noise", str(folder / "train"), "symmetric", "--rate", "0.4"]) == 0
    return folder


@pytest.fixture(scope="session")
def crash_runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrialRunner]:
    """One per process: all files with crashes share its server and its reference runs."""
    with TrialRunner(tmp_path_factory.mktemp("crashes")) as runner:
        yield runner


@pytest.fixture(scope="session")
def crash_reference(crash_runner: TrialRunner) -> Reference:
    """The file operations of a run without faults; `assert_survived` compares with this run."""
    return run_reference(crash_runner)
