"""Runs one after the other: interrupted ones resume, failed ones do not stop the others, settings are shown."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sopdist.compare import running
from sopdist.compare.entries import Entry
from sopdist.compare.plan import Run
from sopdist.compare.running import training_command, training_environ
from tests.compare.conftest import compare, train_here
from tests.support.launching import REPOSITORY, kill_group


def steps_of(run: Path) -> list[int]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["step"] for line in lines if line["kind"] == "train"]


def test_an_interrupted_comparison_resumes_without_repeating_finished_runs(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained: list[str] = []

    def interrupt_the_third(run: Run, launcher: str) -> int:
        trained.append(run.name)
        if len(trained) == 3:
            shortened = Run(**{**vars(run), "arguments": (*run.arguments, "train.max_steps=4")})
            train_here(shortened, launcher)
            (run.folder / "summary.json").write_text(json.dumps({"exit": "preempted"}))
            raise KeyboardInterrupt
        return train_here(run, launcher)

    monkeypatch.setattr(running, "train_process", interrupt_the_third)
    arguments = ("--methods", "ce,gce", "--seeds", "2")
    assert compare(*arguments) == 130
    assert trained == ["ce-wrong-seed0", "gce-wrong-seed0", "ce-wrong-seed1"]
    runs = workspace / "out" / "runs"
    finished = {name: (runs / name / "metrics.jsonl").stat().st_mtime_ns for name in trained[:2]}
    assert steps_of(runs / "ce-wrong-seed1") == [1, 2, 3, 4]
    assert compare(*arguments) == 0
    assert trained[3:] == ["ce-wrong-seed1", "gce-wrong-seed1"]
    assert steps_of(runs / "ce-wrong-seed1") == [1, 2, 3, 4, 5, 6, 7, 8]
    assert {name: (runs / name / "metrics.jsonl").stat().st_mtime_ns for name in finished} == finished
    printed = capsys.readouterr()
    assert "2 runs of 4 are finished already" in printed.err
    assert "run 3 of 4: ce-wrong-seed1 (00:00 elapsed, about 00:" in printed.err
    assert "4 of 4 runs finished" in printed.out


def test_a_run_that_fails_is_reported_and_the_others_are_trained(
    workspace: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As users start it, with a process for each run."""
    arguments = ("--methods", "ce:optim.lr=1e30,gce", "--seeds", "1", "train.max_nonfinite_steps=0")
    assert compare(*arguments) == 1
    printed = capfd.readouterr()
    assert "run ce-optim.lr-1e30-wrong-seed0 has failed (exit code 3); end of out/logs/ce-optim.lr" in printed.err
    assert "not finite" in printed.err
    assert "run 2 of 2: gce-wrong-seed0" in printed.err
    table = (workspace / "out" / "table.md").read_text()
    assert "| ce:optim.lr=1e30 | 0 of 1 | - | - | - | - | 0 | - | - | - |" in table
    assert "| gce | 1 | " in table
    assert "MISSING: run ce-optim.lr-1e30-wrong-seed0: " in table
    assert "NOT EQUAL: optim.lr is 1e+30 for ce:optim.lr=1e30; 0.05 for gce" in table
    assert "No winner yet" in table
    assert "1 of 2 runs finished" in printed.out


def test_ctrl_c_saves_the_current_run(workspace: Path) -> None:
    arguments = [
        "--methods",
        "ce",
        "--seeds",
        "1",
        "train.epochs=100000",
        "evaluate.every=100000",
        "checkpoint.every=0",
    ]
    command = [sys.executable, "-m", "sopdist", "compare", "--cfg", "tiny.yaml", "--out", "out", *arguments]
    environ = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen(command, env=environ, start_new_session=True, stderr=subprocess.PIPE, text=True)
    run = workspace / "out" / "runs" / "ce-wrong-seed0"
    try:
        deadline = time.monotonic() + 60
        while not (run / "metrics.jsonl").exists() or not steps_of(run):
            assert time.monotonic() < deadline
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGINT)
        _, error = process.communicate(timeout=60)
    finally:
        kill_group(process.pid)
    assert process.returncode == 130
    assert "ce-wrong-seed0 saves a checkpoint and stops" in error
    assert error.endswith("sopdist: interrupted\n")
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["exit"], summary["saved_step"]) == ("preempted", summary["steps"])


def test_launchers_start_the_training_command_in_the_group_of_the_comparison(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "mine" / "runs" / "ce-wrong-seed0"
    run = Run(Entry("ce", "ce"), "wrong", 0, folder, tmp_path / "log", ("tiny.yaml", "run.seed=0"), 2)
    train = ["-m", "sopdist", "train"]
    end = ["--cfg", "tiny.yaml", "run.seed=0", "--resume", "auto"]
    assert training_command(run) == [sys.executable, *train, *end]
    for launcher, expected in {
        "torchrun --nproc-per-node 8": ["torchrun", "--nproc-per-node", "8", *train],
        "/opt/bin/deepspeed --num_gpus 8": [
            "/opt/bin/deepspeed", "--num_gpus", "8", "--no_local_rank", "--module", "sopdist", "train",
        ],
        "accelerate launch --multi_gpu": ["accelerate", "launch", "--multi_gpu", *train],
        "srun -n 8": ["srun", "-n", "8", sys.executable, *train],
    }.items():  # fmt: skip
        assert training_command(run, launcher) == [*expected, *end]
    monkeypatch.setenv("RANK", "3")
    environ = training_environ(run, "")
    assert (environ["WANDB_RUN_GROUP"], environ["WANDB_JOB_TYPE"]) == ("mine", "compare")
    assert "RANK" not in environ
    monkeypatch.setenv("WANDB_RUN_GROUP", "chosen")
    assert training_environ(run, "")["WANDB_RUN_GROUP"] == "chosen"


def test_a_launcher_that_does_not_exist_is_an_error(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare("--methods", "ce", "--seeds", "1", "--launcher", "torchrnu -n 2") == 1
    assert "--launcher torchrnu -n 2: torchrnu cannot be started: No such file" in capsys.readouterr().err
    assert not (workspace / "out" / "runs").exists()
