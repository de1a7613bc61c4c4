"""Fixtures: a trained run, and a function that calls `sopdist checkpoint` on it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sopdist.cli import main
from tests.support.small_run import CONFIG, Sopdist, train_small_run


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with shards, a config, and the run `whole` of three epochs."""
    return train_small_run(tmp_path_factory.mktemp("runs"), CONFIG)


@pytest.fixture
def sopdist(workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Sopdist:
    """Call `sopdist checkpoint` in the workspace; returns its output, errors included."""
    monkeypatch.chdir(workspace)

    def call(*arguments: object, code: int = 0) -> str:
        capsys.readouterr()
        exit_code = main(["checkpoint", *map(str, arguments)])
        printed = capsys.readouterr()
        assert exit_code == code, printed
        return printed.out + printed.err

    return call


@pytest.fixture
def run_copy(workspace: Path, tmp_path: Path) -> Path:
    """A copy of the run that tests may damage."""
    return shutil.copytree(workspace / "runs" / "whole", tmp_path / "run_copy")
