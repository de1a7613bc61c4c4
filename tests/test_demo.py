"""The demo: folder, launch commands, output; and, in `make test-long`, the full demo as a user starts it."""

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
from sopdist.demo.launch import SCRIPT, Launch
from sopdist.demo.prepare import open_folder, prepare_data
from sopdist.demo.results import SHADES, draw_image, format_comparison, is_finished, read_run
from sopdist.errors import DataError
from sopdist.launching import descendants, kill_tree
from sopdist.train.config import CONFIGS, load

TIMEOUT = 400.0  # seconds for a full demo on a busy machine


def make_launch(folder: Path, launcher: str = "deepspeed", labels: str = "sym-0.4-seed3") -> Launch:
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


def install_package(folder: Path) -> Path:
    """Copy the package and its configs as a wheel installs them, next to an unrelated folder `configs`."""
    package = folder / "sopdist"
    shutil.copytree(Path(sopdist.__file__).parent, package)
    shutil.copytree(CONFIGS, package / "configs", dirs_exist_ok=True)
    (folder / "configs").mkdir()
    return package


def test_an_installed_package_finds_its_own_configs(tmp_path: Path) -> None:
    package = install_package(tmp_path / "packages")
    program = "from sopdist.train.config import CONFIGS; print(CONFIGS)"
    environ = os.environ | {"PYTHONPATH": str(package.parent)}
    result = subprocess.run([sys.executable, "-c", program], env=environ, cwd=tmp_path, capture_output=True, text=True)
    assert result.stdout.strip() == str(package / "configs"), result.stderr


def test_a_folder_with_other_files_is_refused_and_left_unchanged(tmp_path: Path) -> None:
    (tmp_path / "runs" / "ce").mkdir(parents=True)
    with pytest.raises(DataError, match="not empty and not a demo folder; use a new folder"):
        open_folder(tmp_path, ["ce"])
    (tmp_path / ".gitignore").write_text("*\n")  # many folders have one
    with pytest.raises(DataError, match="not empty and not a demo folder"):
        open_folder(tmp_path, ["ce"])
    assert (tmp_path / "runs" / "ce").is_dir()


def test_a_second_demo_replaces_its_own_runs_and_nothing_else(tmp_path: Path) -> None:
    folder = open_folder(tmp_path / "demo", ["ce", "sop"])
    for kept in ("digits/train", "runs/mine", "runs/ce", "runs/sop"):
        (folder / kept).mkdir(parents=True)
    assert open_folder(tmp_path / "demo", ["ce", "sop"]) == folder
    assert sorted(str(path.relative_to(folder)) for path in folder.glob("*/*")) == ["digits/train", "runs/mine"]


def test_a_folder_of_an_earlier_version_is_recognised(tmp_path: Path) -> None:
    (tmp_path / "runs" / "ce").mkdir(parents=True)
    (tmp_path / ".gitignore").write_text("# Made by `sopdist demo`, which replaces its runs in here.\n*\n")
    open_folder(tmp_path, ["ce"])
    assert not (tmp_path / "runs" / "ce").exists()
    first, rest = (tmp_path / ".gitignore").read_text().split("\n", 1)
    assert (first, rest) == ("# Created by `sopdist demo`, which replaces its runs in this folder.", "*\n")


def test_git_ignores_the_folder(tmp_path: Path) -> None:
    git = ["git", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "--quiet"], check=True)
    folder = open_folder(tmp_path / "demo", [])
    (folder / "big").write_text("x")
    status = subprocess.run([*git, "status", "--porcelain", "--untracked-files=all"], check=True, capture_output=True)
    assert status.stdout == b""


def test_labels_are_resampled_once_with_the_requested_rate(tmp_path: Path) -> None:
    folder = open_folder(tmp_path / "demo", [])
    first = prepare_data(folder, 0.4, seed=3)
    shard = next((folder / "digits" / "train").glob("*.tar"))
    written = shard.stat().st_mtime_ns
    assert prepare_data(folder, 0.4, seed=3) == first
    assert shard.stat().st_mtime_ns == written
    assert first[:3] == ("sym-0.4-seed3", 1438, 359)
    assert abs(first.wrong - 0.36) < 0.04
    assert prepare_data(folder, 0.0, seed=3).wrong == 0


@pytest.mark.parametrize(("launcher", "kind"), [("deepspeed", "deepspeed"), ("torchrun", "ddp")])
def test_each_launcher_trains_with_its_own_engine(tmp_path: Path, launcher: str, kind: str) -> None:
    launch = make_launch(tmp_path, launcher)
    config = load(str(CONFIGS / "demo.yaml"), launch.overrides())
    assert (config.engine.kind, config.method.name, config.run.seed, config.train.epochs) == (kind, "ce", 3, 7)
    assert config.data.location == str(tmp_path / "digits" / "train")
    assert str(SCRIPT) in launch.command()


@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_missing_packages_are_reported_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], launcher: str
) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setitem(sys.modules, "accelerate", None)
    assert main(["demo", "--out", str(tmp_path / "demo"), "--launcher", launcher]) == 1
    message = capsys.readouterr().err
    missing = {"deepspeed": "accelerate, deepspeed", "torchrun": "accelerate"}[launcher]
    assert f"needs {missing}: `make env` installs everything" in message
    assert ("--launcher torchrun does not need DeepSpeed" in message) == (launcher == "deepspeed")
    assert not (tmp_path / "demo").exists()


@pytest.mark.parametrize("wrong", [["--noise", "1.5"], ["--epochs", "0"], ["--ranks", "0"], ["--launcher", "mpirun"]])
def test_options_out_of_range_are_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["demo", *wrong])
    assert stop.value.code == 2
    assert f"argument {wrong[0]}" in capsys.readouterr().err


def test_the_comparison_shows_the_metrics_of_both_runs(tmp_path: Path) -> None:
    ce = read_run(write_run(tmp_path / "ce", [0.5, 0.9, 0.9, 0.7], memorised=0.95))
    sop = read_run(write_run(tmp_path / "sop", [0.5, 0.6, 0.97], memorised=0.04, **noise()))
    assert (ce.best, ce.best_epoch, ce.speed) == (0.9, 1, 250.0)
    lines = [" ".join(line.split()) for line in format_comparison(ce, sop).splitlines()]
    assert lines[:5] == [
        "CE SOP",
        "test accuracy, last epoch 70.0% 97.0%",
        "test accuracy, best epoch 90.0% (epoch 1) 97.0% (epoch 2)",
        "wrong labels memorised 95.0% 4.0%",
        "samples/s 250 200",
    ]
    assert "AUROC of 0.988, average precision 0.876" in lines[6]
    assert "flags 12 labels with 75.0% precision and 50.0% recall" in lines[7]
    assert lines[8] == "Noise rate: 30.0% estimated, 40.0% true. Label accuracy: 60.0% as given, 90.0% as proposed."


def test_without_wrong_labels_the_comparison_has_no_detection_scores(tmp_path: Path) -> None:
    runs = [
        read_run(write_run(tmp_path / name, [0.9], memorised=None, **noise(auroc=None, flag_recall=None)))
        for name in ("ce", "sop")
    ]
    text = format_comparison(*runs)
    assert "AUROC" not in text
    assert re.search(r"memorised +- +-\n", text)


def test_a_run_is_finished_only_if_its_summary_says_so(tmp_path: Path) -> None:
    assert not is_finished(tmp_path / "nothing")
    assert not is_finished(write_run(tmp_path / "stopped", [0.9], finished=False))
    assert is_finished(write_run(tmp_path / "done", [0.9]))
    (tmp_path / "done" / "summary.json").write_text("{")
    assert not is_finished(tmp_path / "done")


def test_each_pixel_is_drawn_with_the_character_of_its_value() -> None:
    pixels = np.zeros((8, 8), np.uint8)
    pixels[0], pixels[1, 7] = 255, 128
    lines = draw_image(pixels)
    assert lines[0] == "@" * 16
    assert lines[1] == " " * 14 + 2 * SHADES[round(128 / 255 * 9)]
    assert lines[2:] == [" " * 16] * 6


def test_killing_a_launcher_also_kills_descendants_in_other_sessions() -> None:
    child = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); {}"
    inner = child.format("time.sleep(60)")
    outer = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {inner!r}], start_new_session=True)"
    process = subprocess.Popen([sys.executable, "-c", f"{outer}; time.sleep(60)"], start_new_session=True)
    deadline = time.monotonic() + 30
    while len(descendants(process.pid)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    pids = [process.pid, *descendants(process.pid)]
    assert len(pids) == 3
    kill_tree(process)
    assert process.returncode == -signal.SIGKILL
    assert wait_until_gone(pids) is True


@pytest.mark.long
def test_a_run_that_fails_shows_its_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = open_folder(tmp_path / "demo", [])
    prepare_data(folder, 0.4, seed=3)
    with pytest.raises(DataError, match="the demo failed: torchrun exited with code 1; end of") as stop:
        make_launch(folder, "torchrun", labels="nothing").run()
    assert "data.labels=nothing" in str(stop.value)  # the first line of the log is the command
    assert "no label set 'nothing'" in capfd.readouterr().err


# -- the full demo, as a user starts it --------------------------------------------------------------------------------


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Any]:
    """Start `sopdist demo ARGUMENTS` in tmp_path; kill what is left of it at the end of the test."""
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
        kill_tree(process)
        process.communicate()


def percentages(row: str, out: str) -> tuple[float, float]:
    """The values of CE and SOP in a row of the table."""
    found = re.search(rf"^{row} +(\d+\.\d)% +(\d+\.\d)%$", out, re.MULTILINE)
    assert found is not None, out
    return float(found[1]), float(found[2])


def wait_until_gone(pids: list[int]) -> list[int] | bool:
    """True when all processes are gone; after ten seconds, those that are still running."""
    deadline = time.monotonic() + 10
    while left := [pid for pid in pids if is_running(pid)]:
        if time.monotonic() > deadline:
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
    out, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, err
    ce, sop = percentages("test accuracy, last epoch", out)
    assert sop > ce + 8
    ce, sop = percentages("wrong labels memorised", out)
    assert ce > 80 > 30 > sop
    auroc = re.search(r"AUROC of (\d\.\d+)", out)
    assert auroc is not None
    assert float(auroc[1]) > 0.97
    labels = re.search(r"Label accuracy: (\d+\.\d)% as given, (\d+\.\d)% as proposed", out)
    assert labels is not None
    assert float(labels[2]) > 90 > float(labels[1])
    (proposed,), (true,) = (re.findall(rf"^{name}( \d.*)", out, re.MULTILINE) for name in ("proposed", "true"))
    pairs = zip(re.findall(r" (\d)", proposed), re.findall(r" (\d)", true), strict=True)
    assert [p == t for p, t in pairs].count(True) >= 4
    for name in ("ce", "sop"):
        assert re.search(rf"{name} 100%", err)  # its progress bar
        assert "[INFO]" in (tmp_path / "demo" / "logs" / f"{name}.log").read_text()  # printed by the launcher
    assert "[INFO]" not in out + err
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]
    summary = json.loads((tmp_path / "demo" / "runs" / "sop" / "summary.json").read_text())
    assert (summary["ranks"], summary["engine"]) == (2, "deepspeed, ZeRO 0")


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_the_demo_of_an_installed_package_runs_twice_in_the_same_folder(
    tmp_path: Path, demo: Any, launcher: str
) -> None:
    package = install_package(tmp_path / "packages")
    for noise_share in ("0", "0.4"):
        arguments = ("--epochs", "1", "--launcher", launcher, "--out", "elsewhere", "--noise", noise_share)
        process = demo(*arguments, PYTHONPATH=str(package.parent))
        out, err = process.communicate(timeout=TIMEOUT)
        assert process.returncode == 0, out + err
        assert ("AUROC" in out) == (noise_share == "0.4")
    log = (tmp_path / "elsewhere" / "logs" / "sop.log").read_text()
    assert "launch/train.py" not in log
    assert f"--cfg {package / 'configs' / 'demo.yaml'}" in log


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_kill_stop_every_process_of_the_demo(
    tmp_path: Path, demo: Any, launcher: str, number: signal.Signals
) -> None:
    process = demo("--launcher", launcher)
    metrics, deadline = tmp_path / "demo" / "runs" / "ce" / "metrics.jsonl", time.monotonic() + 120
    while not (metrics.exists() and metrics.stat().st_size):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    pids = descendants(process.pid)
    assert len(pids) >= 3  # the launcher and two ranks
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.rstrip().endswith("sopdist: interrupted")
    assert "Traceback" not in err
    assert wait_until_gone(pids) is True
