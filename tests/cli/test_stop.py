"""`sopdist stop`: creates the file STOP for a running run, and otherwise says why there is nothing to stop."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sopdist.cli import main
from sopdist.cli.commands import stop
from sopdist.train.distributed import stop_requests
from sopdist.train.record import run_folder
from tests.support.breaking import wait_for
from tests.support.grey_images import write_images
from tests.support.launchers import start

CONFIG = """
data: {root: shards, recipe: digits}
model: {name: mlp}
train: {epochs: 5, batch: 8}
"""


def make_run(folder: Path, status: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps({"finished": status == "finished", "exit": status}))
    return folder


def test_a_running_run_is_stopped_by_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "mine", "running")
    for _ in range(2):  # asking twice does no harm
        assert main(["stop", str(run)]) == 0
        assert capsys.readouterr().out == f"{run}: asked to save and stop after its next step\n"
        assert (run / stop_requests.STOP).exists()


def test_a_running_run_is_stopped_by_the_options_it_was_started_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pets.yaml").write_text(CONFIG)
    by_config, by_key = make_run(tmp_path / "runs" / "pets", "running"), make_run(tmp_path / "far" / "x", "running")
    assert main(["stop", "--cfg", "pets", "optim.lr=0.1"]) == 0
    assert (by_config / "STOP").exists()
    assert not (by_key / "STOP").exists()
    assert main(["stop", "run.folder=far", "--cfg", "pets", "run.name=x"]) == 0
    assert (by_key / "STOP").exists()
    capsys.readouterr()


def test_where_prints_the_folder_and_does_not_stop_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pets.yaml").write_text(CONFIG)
    run = make_run(tmp_path / "runs" / "pets", "running")
    assert main(["stop", "--where", "--cfg", "pets.yaml"]) == 0
    assert main(["stop", "--where", "--cfg", "pets.yaml", "run.name=not-yet"]) == 0
    assert capsys.readouterr().out.split() == ["runs/pets", "runs/not-yet"]
    assert not (run / "STOP").exists()


def test_a_finished_run_need_not_be_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "done", "finished")
    assert main(["stop", str(run)]) == 0
    assert capsys.readouterr().out == f"{run} has already finished: nothing to do\n"
    assert not (run / "STOP").exists()


def test_a_run_that_is_not_running_cannot_be_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "old", "preempted")
    (tmp_path / "empty").mkdir()
    (make_run(tmp_path / "broken", "running") / "summary.json").write_text("{")
    for folder, message in (
        (run, "is not running: its exit status is 'preempted'; resume it with sopdist train --resume auto"),
        (tmp_path / "empty", "has no summary.json: no run has started there yet"),
        (tmp_path / "nowhere", "no such run; a run is the folder run.name inside run.folder"),
        (tmp_path / "broken", "not the summary of a run"),
    ):
        assert main(["stop", str(folder)]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith(f"sopdist: {folder}")
        assert message in err
        assert not (folder / "STOP").exists()


@pytest.mark.parametrize("arguments", [[], ["one", "two"], ["--cfg", "demo", "optim.speed=9"], ["--cfg", "dmeo"]])
def test_wrong_options_are_config_errors(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stop", *arguments]) == 2
    assert capsys.readouterr().err.startswith("sopdist: ")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "mine", "running")
    run.chmod(0o500)
    assert main(["stop", str(run)]) == 1
    assert "STOP: cannot be written" in capsys.readouterr().err


def test_stop_does_not_import_torch(tmp_path: Path) -> None:
    run = make_run(tmp_path / "mine", "running")
    program = f"import sys; from sopdist.cli import main; main(['stop', {str(run)!r}]); print('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.stdout.splitlines()[-1] == "False", ended.stderr
    assert stop.SUMMARY == run_folder.SUMMARY_JSON


@pytest.mark.long
def test_a_run_that_is_asked_to_stop_saves_and_stops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_images(tmp_path / "shards", 40)
    (tmp_path / "pets.yaml").write_text(CONFIG.replace("epochs: 5", "epochs: 100000"))
    keys = ["log.wandb=off", "engine.threads=1", "data.threads=1", "checkpoint.every=100000"]
    started = start("sopdist", ["--cfg", "pets.yaml", *keys], tmp_path, ranks=1)
    run = tmp_path / "runs" / "pets"
    wait_for(lambda: (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size > 0, started)
    assert main(["stop", str(run)]) == 0
    assert started.wait(60).code == 75
    assert json.loads((run / "summary.json").read_text())["exit"] == "preempted"
    assert len(list((run / "checkpoints").iterdir())) == 1
    assert main(["stop", str(run)]) == 1
    capsys.readouterr()
