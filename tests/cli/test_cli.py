"""The command line as users call it."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import sopdist
from sopdist.cli import main
from tests.support.small_splits import samples, write_split


def sopdist_command(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sopdist", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env={**os.environ, **environment})


def test_help_explains_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, text in (
        (["--help"], "find out which labels are wrong"),
        (["demo", "--help"], "scikit-learn"),
        (["bench", "--help"], "table"),
        (["bench", "kernels", "--help"], "sm_80"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 0
        assert text in capsys.readouterr().out


def test_version_and_unknown_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert sopdist.__version__ in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        main(["verfy"])
    assert stop.value.code == 2
    assert "did you mean 'verify'?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--vers"])  # no abbreviations: a typo must not pass as an option


@pytest.mark.parametrize("command", [["labels", "list"], ["verify"], ["inspect"], ["prepare", "digits"]])
def test_data_commands_do_not_import_torch(tmp_path: Path, command: list[str]) -> None:
    write_split(tmp_path / "train")
    options = ["--out", str(tmp_path)] if command[0] == "prepare" else [str(tmp_path / "train")]
    if command[0] == "prepare":
        options.append("--help")  # scikit-learn may import torch
    program = f"""
import sys
from sopdist.cli import main
try:
    main({[*command, *options]!r})
finally:
    print("torch" in sys.modules, file=sys.stderr)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stderr.splitlines()[-1].strip() == "False"


def test_help_and_version_import_no_command() -> None:
    program = "import sys; from sopdist.cli import main; main([{!r}])"
    for option in ("--help", "--version"):
        arguments = [sys.executable, "-X", "importtime", "-c", program.format(option)]
        loaded = subprocess.run(arguments, capture_output=True, text=True).stderr
        assert "sopdist.cli" in loaded
        for heavy in ("torch", "numpy", "tqdm", "sopdist.demo"):
            assert not re.search(rf"\| +{heavy}$", loaded, re.MULTILINE), heavy


def test_sop_is_imported_on_demand() -> None:
    program = "import sopdist; assert 'SOP' in dir(sopdist); from sopdist import SOP; print(SOP, sopdist.noise)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "SOP" in result.stdout, result.stderr
    with pytest.raises(AttributeError, match="has no attribute 'SOAP'"):
        _ = sopdist.SOAP  # type: ignore[attr-defined]


def test_an_interrupt_during_startup_prints_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib, "import_module", interrupted)
    assert main(["demo"]) == 130
    assert capsys.readouterr().err == "sopdist: interrupted\n"


def test_any_class_name_can_be_printed_on_any_terminal(tmp_path: Path) -> None:
    folder = tmp_path / "train"
    write_split(folder, samples(3), classes=("\N{CAT FACE}", "dog", "bär"))
    files = [str(tmp_path / name) for name in ("s.png", "d.csv", "v.json")]
    for command in (
        ["inspect", str(folder), "--sheet", files[0]],
        ["labels", "diff", str(folder), "given", "given", "--csv", files[1]],
        ["labels", "noise", str(folder), "pair", "--rate", "1", "--pairs", "\N{CAT FACE}:1"],
        ["labels", "noise", str(folder), "pair", "--rate", "1", "--pairs", "\N{DOG FACE}:1"],
        ["verify", str(folder), "--json", files[2]],
    ):
        result = sopdist_command(*command, cwd=tmp_path, PYTHONIOENCODING="ascii", PYTHONUTF8="1")
        assert result.returncode == ("\N{DOG FACE}:1" in command), result.stderr
        assert "Error" not in result.stderr
        assert result.stdout.isascii()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_reported_in_one_line(tmp_path: Path) -> None:
    write_split(tmp_path)
    command = [sys.executable, "-m", "sopdist", "labels", "list", str(tmp_path)]
    with open("/dev/full", "w") as full:
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert result.returncode == 1
    assert result.stderr == "sopdist: cannot write: No space left on device\n"


def test_a_closed_pipe_is_not_an_error_message(tmp_path: Path) -> None:
    write_split(tmp_path)
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "sopdist", "labels", "list", str(tmp_path)]
    result = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (result.returncode, result.stderr) == (1, "")
