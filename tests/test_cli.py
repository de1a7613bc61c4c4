"""The command line as a person starts it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import sopdist
from sopdist.cli import main


def sopdist_command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "sopdist", *arguments], capture_output=True, text=True, cwd=cwd)


def test_the_demo_beats_cross_entropy_and_finds_the_wrong_labels(tmp_path: Path) -> None:
    result = sopdist_command("demo", "--epochs", "40", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    found = re.search(r"test accuracy +([\d.]+)% +([\d.]+)%", result.stdout)
    assert found is not None
    ce, sop = map(float, found.groups())
    assert sop > ce + 8
    memorised = re.search(r"wrong labels memorised +([\d.]+)% +([\d.]+)%", result.stdout)
    assert memorised is not None
    assert float(memorised[1]) > 80 > 30 > float(memorised[2])
    auroc = re.search(r"AUROC of (\d\.\d+)", result.stdout)
    assert auroc is not None
    assert float(auroc[1]) > 0.97
    assert "5 most suspicious labels" in result.stdout
    assert "100%" in result.stderr  # the progress bar
    assert list(tmp_path.iterdir()) == []


def test_the_demo_without_noise_and_with_bad_options(tmp_path: Path) -> None:
    assert sopdist_command("demo", "--noise", "0", "--epochs", "1", cwd=tmp_path).returncode == 0
    result = sopdist_command("demo", "--noise", "1.5", cwd=tmp_path)
    assert result.returncode == 2
    assert "--noise must be in [0, 1]" in result.stderr


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, says in (
        (["--help"], "find out which labels are wrong"),
        (["demo", "--help"], "scikit-learn"),
        (["bench", "--help"], "table"),
        (["bench", "kernels", "--help"], "sm_80"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 0
        assert says in capsys.readouterr().out


def test_version_and_unknown_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert sopdist.__version__ in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        main(["trian"])
    assert stop.value.code == 2
