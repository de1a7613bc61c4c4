"""A run that was really trained, and `sopdist checkpoint` called on it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sopdist.cli import main
from tests.checkpoint.small_run import CONFIG, Sopdist, train_whole


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with shards, a config, and the run `whole` of three epochs."""
    return train_whole(tmp_path_factory.mktemp("runs"), CONFIG)


@pytest.fixture
def sopdist(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Sopdist:
    """Call `sopdist checkpoint` in the folder of the run; gives what it printed, errors included."""
    monkeypatch.chdir(place)

    def call(*arguments: object, code: int = 0) -> str:
        capsys.readouterr()
        found = main(["checkpoint", *map(str, arguments)])
        told = capsys.readouterr()
        assert found == code, told
        return told.out + told.err

    return call


@pytest.fixture
def copied(place: Path, tmp_path: Path) -> Path:
    """A copy of the run, to be damaged."""
    return shutil.copytree(place / "runs" / "whole", tmp_path / "copied")
