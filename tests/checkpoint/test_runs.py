"""Runs that save and go on in circumstances that are rare, but not wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sopdist.checkpoint import complete_checkpoints, verify_checkpoint
from sopdist.checkpoint.pieces import Piece
from sopdist.checkpoint.writing import CheckpointWriter, save_pieces
from sopdist.train.running import run_config
from tests.e2e.records import lines_of, losses_of
from tests.train.grey_images import write_images

CONFIG = """
data: {root: shards, split: train, recipe: digits, labels: wrong, threads: 1}
model: {name: mlp}
optim: {schedule: constant}
train: {epochs: 1, batch: 9}
engine: {threads: 1}
log: {every: 4, wandb: 'off'}
"""  # an epoch is four steps


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with shards and a config, where a run can begin."""
    write_images(tmp_path / "shards" / "train", 30)
    (tmp_path / "small.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_config_with_an_infinity_is_saved_though_json_has_none(place: Path) -> None:
    assert run_config("small.yaml", ["run.name=x", "train.clip=.inf"]) == 0
    (folder,) = complete_checkpoints(place / "runs" / "x")
    assert verify_checkpoint(folder).config["train"]["clip"] == ".inf"
    again = ["run.name=x", "train.clip=.inf", "train.epochs=2"]
    assert run_config("small.yaml", again, resume="auto") == 0


def test_sums_of_a_program_that_counts_other_things_are_left_and_the_run_goes_on(place: Path) -> None:
    assert run_config("small.yaml", ["run.name=x", "train.max_steps=2"]) == 0
    (folder,) = complete_checkpoints(place / "runs" / "x")
    saved = verify_checkpoint(folder)
    pieces = {name: Piece.whole(saved.read(name)) for name in saved.tensors}
    pieces["tally/0"] = Piece.whole(torch.ones(3, dtype=torch.float64))
    save_pieces(pieces, CheckpointWriter(folder, 0, 1, saved.index.about), None)
    assert run_config("small.yaml", ["run.name=x"], resume="auto") == 0
    assert lines_of(place / "runs" / "x")[-1]["step"] == 4


def test_an_older_checkpoint_that_cannot_be_removed_does_not_cost_the_new_one(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It must not be taken for a save that has failed, whose files are removed."""
    keep = ["run.name=x", "checkpoint.keep=1"]
    assert run_config("small.yaml", [*keep, "train.max_steps=2"]) == 0
    folder = place / "runs" / "x" / "checkpoints"
    (folder / "step-00000001" / "complete").mkdir(parents=True)  # a folder, which is not removed as a file is
    (folder / "step-00000001" / "state.json").write_text("{}")  # what says that it is complete, of the first format
    assert run_config("small.yaml", keep, resume="auto") == 0
    assert "CANNOT BE REMOVED" in caplog.text
    assert "COULD NOT SAVE" not in caplog.text
    verify_checkpoint(folder / "step-00000004")
    assert not (folder / "step-00000002").exists()


@pytest.mark.parametrize("background", ["true", "false"])
def test_saving_in_the_background_or_not_is_the_same_run(place: Path, background: str) -> None:
    assert run_config("small.yaml", ["run.name=never", "log.every=1", "checkpoint.every=0"]) == 0
    saved = ["run.name=x", "log.every=1", "checkpoint.steps=1", "checkpoint.keep=9", f"checkpoint.async={background}"]
    assert run_config("small.yaml", saved) == 0
    assert losses_of(place / "runs" / "x") == losses_of(place / "runs" / "never")
    steps = [verify_checkpoint(folder).step for folder in complete_checkpoints(place / "runs" / "x")]
    assert steps == [1, 2, 3, 4]
