"""Runs that save and resume under rare but valid circumstances."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sopdist.checkpoint import complete_checkpoints, verify_checkpoint
from sopdist.checkpoint.fragments import Fragment
from sopdist.checkpoint.writing import CheckpointWriter, save_fragments
from sopdist.train.run import run_config
from tests.support.grey_images import write_images
from tests.support.records import lines_of, losses_of

CONFIG = """
data: {root: shards, split: train, recipe: digits, labels: wrong, threads: 1}
model: {name: mlp}
optim: {schedule: constant}
train: {epochs: 1, batch: 9}
engine: {threads: 1}
log: {every: 4, wandb: 'off'}
"""  # four steps per epoch


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with shards and a config, in which a run can start."""
    write_images(tmp_path / "shards" / "train", 30)
    (tmp_path / "small.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_config_with_infinity_is_saved_although_json_has_none(workspace: Path) -> None:
    assert run_config("small.yaml", ["run.name=x", "train.clip=.inf"]) == 0
    (folder,) = complete_checkpoints(workspace / "runs" / "x")
    assert verify_checkpoint(folder).config["train"]["clip"] == ".inf"
    again = ["run.name=x", "train.clip=.inf", "train.epochs=2"]
    assert run_config("small.yaml", again, resume="auto") == 0


def test_sums_of_a_version_with_other_metrics_are_dropped_and_the_run_resumes(workspace: Path) -> None:
    assert run_config("small.yaml", ["run.name=x", "train.max_steps=2"]) == 0
    (folder,) = complete_checkpoints(workspace / "runs" / "x")
    saved = verify_checkpoint(folder)
    fragments = {name: Fragment.full(saved.read(name)) for name in saved.tensors}
    fragments["step_metrics/0"] = Fragment.full(torch.ones(3, dtype=torch.float64))
    save_fragments(fragments, CheckpointWriter(folder, 0, 1, saved.index.about), None)
    assert run_config("small.yaml", ["run.name=x"], resume="auto") == 0
    assert lines_of(workspace / "runs" / "x")[-1]["step"] == 4


def test_an_old_checkpoint_that_cannot_be_removed_does_not_fail_the_new_save(
    workspace: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It must not be mistaken for a failed save, whose files are removed."""
    keep = ["run.name=x", "checkpoint.keep=1"]
    assert run_config("small.yaml", [*keep, "train.max_steps=2"]) == 0
    folder = workspace / "runs" / "x" / "checkpoints"
    (folder / "step-00000001" / "complete").mkdir(parents=True)  # unlink fails on a folder
    (folder / "step-00000001" / "state.json").write_text("{}")  # the marker of format 1
    assert run_config("small.yaml", keep, resume="auto") == 0
    assert "cannot be removed" in caplog.text
    assert "could not be saved" not in caplog.text
    verify_checkpoint(folder / "step-00000004")
    assert not (folder / "step-00000002").exists()


@pytest.mark.parametrize("background", ["true", "false"])
def test_saving_in_the_background_does_not_change_the_run(workspace: Path, background: str) -> None:
    assert run_config("small.yaml", ["run.name=never", "log.every=1", "checkpoint.every=0"]) == 0
    saved = ["run.name=x", "log.every=1", "checkpoint.steps=1", "checkpoint.keep=9", f"checkpoint.async={background}"]
    assert run_config("small.yaml", saved) == 0
    assert losses_of(workspace / "runs" / "x") == losses_of(workspace / "runs" / "never")
    steps = [verify_checkpoint(folder).step for folder in complete_checkpoints(workspace / "runs" / "x")]
    assert steps == [1, 2, 3, 4]
