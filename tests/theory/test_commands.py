"""The commands `sopdist theory ...` as a user starts them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from sopdist import cli
from sopdist.cli import THEORY, main

SMALL = {
    "implicit-bias": ["--samples", "8", "--parameters", "10", "--rank", "2", "--wrong", "1"],
    "lambda": ["--samples", "12", "--parameters", "15"],
    "phase": ["--samples", "12", "--parameters", "15"],
    "landscape": ["--samples", "6", "--parameters", "8", "--rank", "2", "--wrong", "1"],
    "flow": [],
}


def start(name: str, out: Path, *more: str) -> int:
    return main(["theory", name, "--quick", "--trials", "2", "--out", str(out), *SMALL[name], *more])


def read(out: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / f"{name}.json").read_text())
    return found


@pytest.mark.parametrize("name", list(SMALL))
def test_a_command_writes_figures_numbers_and_a_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    out = tmp_path / "new" / "folder"
    assert start(name, out, "--jobs", "1") == 0
    printed = " ".join(capsys.readouterr().out.split())
    found = read(out, name)
    assert found["command"] == name
    assert found["settings"]["seed"] == 0
    assert found["settings"]["trials"] == 2
    assert found["verdict"] in printed
    assert "nan" not in found["verdict"]
    assert {path.name for path in out.iterdir()} == {f"{name}{suffix}" for suffix in (".png", ".svg", ".csv", ".json")}
    assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert ElementTree.parse(out / f"{name}.svg").getroot().tag.endswith("svg")
    lines = (out / f"{name}.csv").read_text().splitlines()
    assert len(lines) > 10
    assert {line.count(",") for line in lines} == {lines[0].count(",")}


@pytest.mark.parametrize("name", ["implicit-bias", "lambda", "phase"])
@pytest.mark.filterwarnings("error")
def test_the_smallest_problems_have_a_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    sizes = ["--samples", "2", "--parameters", "2"]
    more = ["--rank", "2", "--wrong", "1"] if name == "implicit-bias" else []
    assert main(["theory", name, "--quick", "--trials", "1", "--jobs", "1", "--out", str(tmp_path), *sizes, *more]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "1 problems" not in printed
    assert "1 trials" not in printed
    assert "nothing" not in printed
    assert "nan" not in printed


def test_every_command_is_tested() -> None:
    assert SMALL.keys() == THEORY.keys()


@pytest.mark.parametrize("name", ["lambda", "landscape"])
def test_the_numbers_do_not_depend_on_the_number_of_processes(tmp_path: Path, name: str) -> None:
    for jobs in ("1", "2"):
        assert start(name, tmp_path / jobs, "--jobs", jobs) == 0
    assert read(tmp_path / "1", name) == read(tmp_path / "2", name)
    for suffix in (".csv", ".svg", ".png"):
        one, two = ((tmp_path / jobs / f"{name}{suffix}").read_bytes() for jobs in ("1", "2"))
        assert one == two, suffix


def test_another_seed_gives_other_problems(tmp_path: Path) -> None:
    for seed in ("0", "1"):
        assert start("phase", tmp_path / seed, "--jobs", "1", "--seed", seed) == 0
    assert read(tmp_path / "0", "phase")["coherence"] != read(tmp_path / "1", "phase")["coherence"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["landscape", "--wrong", "21"], "k = 21: must be from 0 to N = 20, the number of observations"),
        (["implicit-bias", "--rank", "21"], "r = 21: a matrix of N x p = 20 x 40 has at most rank 20"),
        (["implicit-bias", "--gamma", "2"], "gamma = 2: must be below 1"),
        (["implicit-bias", "--gamma", "1e-40"], "gamma = 1e-40: must be at least 1e-30"),
        (["lambda", "--parameters", "50"], "--samples 100 --parameters 50: the curves need a rank of up to 80"),
        (["phase", "--lambda", "0"], "'0' is not a finite number above 0"),
        (["phase", "--lambda", "-1"], "argument --lambda"),
        (["lambda", "--trials", "0"], "'0' is not an integer from 1"),
        (["phas"], "did you mean 'phase'?"),
    ],
)
def test_bad_input_is_refused_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    out = tmp_path / "out"
    try:
        code = main(["theory", *arguments, "--out", str(out)])
    except SystemExit as error:
        code = error.code
    assert code != 0
    errors = capsys.readouterr().err
    assert message in errors
    assert "Traceback" not in errors
    assert not out.exists()


def test_a_folder_that_cannot_be_written_is_reported_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert start("phase", tmp_path / "file" / "below") == 1
    assert "cannot be written" in capsys.readouterr().err
    assert start("phase", tmp_path / "file") == 1
    assert "file: is a file, not a folder" in capsys.readouterr().err


def test_a_missing_package_is_reported_with_the_extra_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("sopdist.theory")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cvxpy", None)  # as if it were not installed
    assert cli.main(["theory", "phase", "--help"]) == 1
    assert capsys.readouterr().err == "sopdist: this needs cvxpy: pip install 'sopdist[theory]'\n"


def start_and_wait_for_processes(out: Path) -> tuple[subprocess.Popen[str], list[int]]:
    program = subprocess.Popen(
        [sys.executable, "-m", "sopdist", "theory", "phase", "--jobs", "2", "--out", str(out)],
        stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    started: list[int] = []
    deadline = time.monotonic() + 60
    while len(started) < 3 and time.monotonic() < deadline:  # two workers and the resource tracker of multiprocessing
        time.sleep(0.1)
        started = children(program.pid)
    return program, started


def wait_until_gone(pids: list[int], timeout: float = 30.0) -> bool:
    deadline = time.monotonic() + timeout
    while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not left


def test_an_interrupt_stops_all_processes_at_once(tmp_path: Path) -> None:
    program, started = start_and_wait_for_processes(tmp_path)
    os.killpg(program.pid, signal.SIGINT)
    _, errors = program.communicate(timeout=60)
    assert program.returncode == 130
    assert errors.splitlines()[-1] == "sopdist: interrupted"
    assert "Traceback" not in errors
    assert not list(tmp_path.iterdir())
    assert wait_until_gone(started)


def test_a_command_that_is_killed_leaves_no_process_behind(tmp_path: Path) -> None:
    program, started = start_and_wait_for_processes(tmp_path)
    program.kill()
    program.wait(60)
    assert wait_until_gone(started)


def is_running(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
