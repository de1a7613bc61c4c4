"""The demo: its folder, its launches, its words; and, in `make test-long`, all of it as a person starts it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sopdist
from sopdist.cli import main
from sopdist.config import load_config
from sopdist.data.errors import DataError
from sopdist.demo.comparing import comparison, is_finished, read_run
from sopdist.demo.config import write_config
from sopdist.demo.folder import open_folder
from sopdist.demo.launching import SCRIPT, Launch, _descendants, end_family
from sopdist.demo.preparing import prepare
from sopdist.demo.suspects import SHADES, draw
from sopdist.train.config import CONFIGS, Config, load

LONGEST = 400.0  # seconds for a whole demo on a busy machine


def launch_of(folder: Path, launcher: str = "deepspeed", labels: str = "sym-0.4-seed3") -> Launch:
    return Launch(launcher, 2, "CPU", "ce", folder, labels, epochs=7, seed=3)


def write_run(folder: Path, accuracies: list[float], finished: bool = True, **last: Any) -> Path:
    folder.mkdir()
    lines = []
    for epoch, accuracy in enumerate(accuracies):
        head = {"step": 10 * (epoch + 1), "epoch": epoch}
        lines.append({"kind": "train", **head, "samples_per_second": 100.0 * (epoch + 1)})
        lines.append({"kind": "eval", **head, "test/top1": accuracy})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = {"finished": finished, "last": {"test/top1": accuracies[-1], **last}}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def noise(**changes: Any) -> dict[str, Any]:
    found = {
        "auroc": 0.9876, "average_precision": 0.8765, "flagged": 12, "flag_precision": 0.75, "flag_recall": 0.5,
        "rate": 0.3, "true_rate": 0.4, "given_accuracy": 0.6, "corrected_accuracy": 0.9,
    }  # fmt: skip
    return {f"noise/{key}": value for key, value in (found | changes).items()}


def test_the_config_for_a_package_without_the_repository_is_the_repositorys(tmp_path: Path) -> None:
    assert write_config(tmp_path) == CONFIGS / "demo.yaml"
    ours = write_config(tmp_path, configs=tmp_path / "nothing")
    assert ours.parent == tmp_path
    assert load_config(Config, ours, ["run.name=demo"]) == load("demo")


def test_a_folder_of_somebody_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "runs" / "ce").mkdir(parents=True)
    with pytest.raises(DataError, match="holds other things; name a new folder"):
        open_folder(tmp_path, ["ce"])
    (tmp_path / ".gitignore").write_text("*\n")  # many folders have one
    with pytest.raises(DataError, match="holds other things"):
        open_folder(tmp_path, ["ce"])
    assert (tmp_path / "runs" / "ce").is_dir()


def test_a_second_demo_replaces_its_own_runs_and_nothing_else(tmp_path: Path) -> None:
    folder = open_folder(tmp_path / "demo", ["ce", "sop"])
    for kept in ("digits/train", "runs/mine", "runs/ce", "runs/sop"):
        (folder / kept).mkdir(parents=True)
    assert open_folder(tmp_path / "demo", ["ce", "sop"]) == folder
    assert sorted(str(path.relative_to(folder)) for path in folder.glob("*/*")) == ["digits/train", "runs/mine"]


def test_git_does_not_see_the_folder(tmp_path: Path) -> None:
    git = ["git", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "--quiet"], check=True)
    folder = open_folder(tmp_path / "demo", [])
    (folder / "big").write_text("x")
    told = subprocess.run([*git, "status", "--porcelain", "--untracked-files=all"], check=True, capture_output=True)
    assert told.stdout == b""


def test_labels_are_drawn_once_and_are_as_wrong_as_they_should_be(tmp_path: Path) -> None:
    folder = open_folder(tmp_path / "demo", [])
    first = prepare(folder, 0.4, seed=3)
    shard = next((folder / "digits" / "train").glob("*.tar"))
    written = shard.stat().st_mtime_ns
    assert prepare(folder, 0.4, seed=3) == first
    assert shard.stat().st_mtime_ns == written
    assert first[:3] == ("sym-0.4-seed3", 1438, 359)
    assert abs(first.wrong - 0.36) < 0.04
    assert prepare(folder, 0.0, seed=3).wrong == 0


@pytest.mark.parametrize(("launcher", "kind"), [("deepspeed", "deepspeed"), ("torchrun", "ddp")])
def test_a_launch_is_a_config_of_its_own_kind(tmp_path: Path, launcher: str, kind: str) -> None:
    launch = launch_of(tmp_path, launcher)
    config = load(str(write_config(tmp_path)), launch.overrides())
    assert (config.engine.kind, config.objective.name, config.run.seed, config.train.epochs) == (kind, "ce", 3, 7)
    assert config.data.location == str(tmp_path / "digits" / "train")
    assert str(SCRIPT) in launch.command()


@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_what_is_not_installed_is_named_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], launcher: str
) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setitem(sys.modules, "accelerate", None)
    assert main(["demo", "--out", str(tmp_path / "demo"), "--launcher", launcher]) == 1
    told = capsys.readouterr().err
    missing = {"deepspeed": "accelerate, deepspeed", "torchrun": "accelerate"}[launcher]
    assert f"needs {missing}: `make env` installs everything" in told
    assert ("--launcher torchrun does without" in told) == (launcher == "deepspeed")
    assert not (tmp_path / "demo").exists()


@pytest.mark.parametrize("wrong", [["--noise", "1.5"], ["--epochs", "0"], ["--ranks", "0"], ["--launcher", "mpirun"]])
def test_options_out_of_range_are_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["demo", *wrong])
    assert stop.value.code == 2
    assert f"argument {wrong[0]}" in capsys.readouterr().err


def test_the_comparison_says_what_the_files_say(tmp_path: Path) -> None:
    ce = read_run(write_run(tmp_path / "ce", [0.5, 0.9, 0.9, 0.7], memorised=0.95))
    sop = read_run(write_run(tmp_path / "sop", [0.5, 0.6, 0.97], memorised=0.04, **noise()))
    assert (ce.best, ce.best_epoch, ce.speed) == (0.9, 1, 250.0)
    told = [" ".join(line.split()) for line in comparison(ce, sop).splitlines()]
    assert told[:5] == [
        "CE SOP",
        "test accuracy, last epoch 70.0% 97.0%",
        "test accuracy, best epoch 90.0% (epoch 1) 97.0% (epoch 2)",
        "wrong labels memorised 95.0% 4.0%",
        "samples/s 250 200",
    ]
    assert "AUROC of 0.988, average precision 0.876" in told[6]
    assert "flags 12 labels: 75.0% of these are wrong, and they are 50.0% of all wrong ones" in told[7]
    assert told[8] == "Estimated noise 30.0%, true 40.0%. Labels right as given 60.0%, as proposed 90.0%."


def test_without_wrong_labels_nothing_is_said_about_finding_them(tmp_path: Path) -> None:
    runs = [
        read_run(write_run(tmp_path / name, [0.9], memorised=None, **noise(auroc=None, flag_recall=None)))
        for name in ("ce", "sop")
    ]
    told = comparison(*runs)
    assert "AUROC" not in told
    assert re.search(r"memorised +- +-\n", told)


def test_only_a_summary_tells_that_a_run_is_finished(tmp_path: Path) -> None:
    assert not is_finished(tmp_path / "nothing")
    assert not is_finished(write_run(tmp_path / "stopped", [0.9], finished=False))
    assert is_finished(write_run(tmp_path / "done", [0.9]))
    (tmp_path / "done" / "summary.json").write_text("{")
    assert not is_finished(tmp_path / "done")


def test_a_picture_is_as_dark_as_its_pixels() -> None:
    pixels = np.zeros((8, 8), np.uint8)
    pixels[0], pixels[1, 7] = 255, 128
    lines = draw(pixels)
    assert lines[0] == "@" * 16
    assert lines[1] == " " * 14 + 2 * SHADES[round(128 / 255 * 9)]
    assert lines[2:] == [" " * 16] * 6


def test_the_end_of_a_launcher_is_the_end_of_its_children_in_other_sessions() -> None:
    child = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); {}"
    inner = child.format("time.sleep(60)")
    outer = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {inner!r}], start_new_session=True)"
    process = subprocess.Popen([sys.executable, "-c", f"{outer}; time.sleep(60)"], start_new_session=True)
    until = time.monotonic() + 30
    while len(_descendants(process.pid)) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    family = [process.pid, *_descendants(process.pid)]
    assert len(family) == 3
    end_family(process)
    assert process.returncode == -signal.SIGKILL
    assert wait_for_the_end(family)


@pytest.mark.long
def test_a_run_that_fails_shows_its_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = open_folder(tmp_path / "demo", [])
    prepare(folder, 0.4, seed=3)
    with pytest.raises(DataError, match="the demo stops: torchrun has ended with code 1; the end of") as stop:
        launch_of(folder, "torchrun", labels="nothing").run()
    assert "data.labels=nothing" in str(stop.value)  # the command is the log's first line
    assert "no label set 'nothing'" in capfd.readouterr().err


# -- the whole demo, as a person starts it -----------------------------------------------------------------------------


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Any]:
    """Starts `sopdist demo ARGUMENTS` in a folder; whatever it leaves behind at the end is ended."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, **environ: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "sopdist", "demo", *arguments]
        variables = os.environ | {"CUDA_VISIBLE_DEVICES": "", **environ}
        process = subprocess.Popen(
            command, cwd=tmp_path, env=variables, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        end_family(process)
        process.communicate()


def both(what: str, out: str) -> tuple[float, float]:
    """The percentages of CE and SOP in a row of the table."""
    found = re.search(rf"^{what} +(\d+\.\d)% +(\d+\.\d)%$", out, re.MULTILINE)
    assert found is not None, out
    return float(found[1]), float(found[2])


def wait_for_the_end(pids: list[int]) -> list[int] | bool:
    """True when none of the processes is left; else those that are, after some seconds."""
    until = time.monotonic() + 10
    while left := [pid for pid in pids if is_running(pid)]:
        if time.monotonic() > until:
            return left
        time.sleep(0.05)
    return True


def is_running(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


@pytest.mark.long
def test_the_demo_beats_cross_entropy_and_finds_the_wrong_labels(tmp_path: Path, demo: Any) -> None:
    process = demo("--epochs", "40")
    out, err = process.communicate(timeout=LONGEST)
    assert process.returncode == 0, err
    ce, sop = both("test accuracy, last epoch", out)
    assert sop > ce + 8
    ce, sop = both("wrong labels memorised", out)
    assert ce > 80 > 30 > sop
    auroc = re.search(r"AUROC of (\d\.\d+)", out)
    assert auroc is not None
    assert float(auroc[1]) > 0.97
    labels = re.search(r"right as given (\d+\.\d)%, as proposed (\d+\.\d)%", out)
    assert labels is not None
    assert float(labels[2]) > 90 > float(labels[1])
    (proposed,), (true,) = (re.findall(rf"^{what}( \d.*)", out, re.MULTILINE) for what in ("proposed", "true"))
    pairs = zip(re.findall(r" (\d)", proposed), re.findall(r" (\d)", true), strict=True)
    assert [p == t for p, t in pairs].count(True) >= 4
    for name in ("ce", "sop"):
        assert re.search(rf"{name} 100%", err)  # its progress bar
        assert "[INFO]" in (tmp_path / "demo" / "logs" / f"{name}.log").read_text()  # of the launcher
    assert "[INFO]" not in out + err
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]
    summary = json.loads((tmp_path / "demo" / "runs" / "sop" / "summary.json").read_text())
    assert (summary["ranks"], summary["engine"]) == (2, "deepspeed, ZeRO 0")


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_a_package_without_the_repository_shows_the_demo_twice_in_the_same_folder(
    tmp_path: Path, demo: Any, launcher: str
) -> None:
    shutil.copytree(Path(sopdist.__file__).parent, tmp_path / "packages" / "sopdist")
    for noise_share in ("0", "0.4"):
        arguments = ("--epochs", "1", "--launcher", launcher, "--out", "elsewhere", "--noise", noise_share)
        process = demo(*arguments, PYTHONPATH=str(tmp_path / "packages"))
        out, err = process.communicate(timeout=LONGEST)
        assert process.returncode == 0, out + err
        assert ("AUROC" in out) == (noise_share == "0.4")
    log = (tmp_path / "elsewhere" / "logs" / "sop.log").read_text()
    assert "launch/train.py" not in log
    assert f"--cfg {tmp_path / 'elsewhere' / 'demo.yaml'}" in log


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_kill_end_everything_that_the_demo_started(
    tmp_path: Path, demo: Any, launcher: str, number: signal.Signals
) -> None:
    process = demo("--launcher", launcher)
    metrics, until = tmp_path / "demo" / "runs" / "ce" / "metrics.jsonl", time.monotonic() + 120
    while not (metrics.exists() and metrics.stat().st_size):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.1)
    family = _descendants(process.pid)
    assert len(family) >= 3  # the launcher and two ranks
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.rstrip().endswith("sopdist: interrupted")
    assert "Traceback" not in err
    assert wait_for_the_end(family) is True
