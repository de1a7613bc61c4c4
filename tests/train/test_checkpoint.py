"""A run that stopped and went on is the run that never stopped, on any number of ranks and with another engine."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sopdist.train.checkpoint import complete_checkpoints, find_checkpoint, read_tensors, write_tensors
from sopdist.train.running import run_config
from tests.e2e.launchers import run
from tests.e2e.records import lines_of, losses_of, newest_checkpoint, table_in
from tests.train.grey_images import write_images

SAMPLES, BATCH = 61, 9  # 7 steps an epoch
STEPS = 7
CONFIG = f"""
data: {{root: shards, split: train, recipe: digits, labels: wrong, threads: 1}}
model: {{name: small_conv}}
objective: {{visits: 1.5}}
optim: {{lr: 0.05, warmup_epochs: 0.5}}
train: {{epochs: 3, batch: {BATCH}}}
engine: {{threads: 1}}
evaluate: {{splits: {{val: val}}}}
checkpoint: {{keep: 9}}
log: {{every: 1, wandb: 'off'}}
"""

Train = Callable[..., Path]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with shards, a config, and the run `whole` of three epochs that was never stopped."""
    folder = tmp_path_factory.mktemp("runs")
    write_images(folder / "shards" / "train", SAMPLES)
    write_images(folder / "shards" / "val", 30)
    (folder / "small.yaml").write_text(CONFIG)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run_config("small.yaml", ["run.name=whole"]) == 0
    return folder


@pytest.fixture
def train(place: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """Train in this process; the run's folder."""

    def start(name: str, *overrides: str, resume: str = "none", code: int = 0) -> Path:
        monkeypatch.chdir(place)
        assert run_config("small.yaml", [f"run.name={name}", *overrides], resume=resume) == code
        return place / "runs" / name

    return start


def checkpoint(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step:08d}"


def assert_same_ending(one: Path, other: Path) -> None:
    """Network, optimizer and noise table, bit for bit."""
    for name in ("network", "optimizer"):
        found, wanted = (load_file(newest_checkpoint(run) / f"{name}.safetensors") for run in (one, other))
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], wanted[key]) for key in wanted), name
    found, wanted = (table_in(newest_checkpoint(run)) for run in (one, other))
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    assert wanted["u"].abs().max() > 0.01  # there was something to lose


def state_of(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((folder / "state.json").read_text())
    return state


def test_checkpoints_are_written_after_each_epoch_and_say_what_they_are_of(place: Path) -> None:
    folders = complete_checkpoints(place / "runs" / "whole")
    assert [folder.name for folder in folders] == ["step-00000007", "step-00000014", "step-00000021"]
    for folder in folders:
        names = {"network.safetensors", "optimizer.safetensors", "noise-0-of-1.safetensors", "state.json"}
        assert {path.name for path in folder.iterdir()} == names
    evals = lines_of(place / "runs" / "whole", "eval")
    assert [state_of(folder)["best"] for folder in folders] == [line["best"] for line in evals]


@pytest.mark.parametrize("network", ["small_conv", "mlp"])
def test_a_run_that_begins_from_a_checkpoint_goes_on_bit_for_bit(train: Train, place: Path, network: str) -> None:
    """With a cosine schedule, and for the mlp with running batch statistics."""
    whole = place / "runs" / "whole" if network == "small_conv" else train("whole-mlp", "model.name=mlp")
    again = train(f"again-{network}", f"model.name={network}", resume=str(checkpoint(whole, STEPS)))
    assert [line["step"] for line in lines_of(again)] == list(range(STEPS + 1, 3 * STEPS + 1))
    assert [line["loss"] for line in lines_of(again)] == losses_of(whole)[STEPS:]
    for kind, keys in (("eval", ("val/top1", "val/loss", "best")), ("noise", ("auroc", "rate", "flagged"))):
        found, wanted = lines_of(again, kind), lines_of(whole, kind)[1:]
        assert [[line[key] for key in keys] for line in found] == [[line[key] for key in keys] for line in wanted]
    assert_same_ending(again, whole)


@pytest.mark.parametrize("stop", [STEPS, STEPS + 3])
def test_a_run_that_stops_after_or_within_an_epoch_and_resumes_is_one_that_never_stopped(
    train: Train, stop: int
) -> None:
    """With a constant rate: cosine ends where the run ends, so that max_steps would make another run of it."""
    whole = train(f"constant-{stop}", "optim.schedule=constant", "train.epochs=2")
    constant = ("optim.schedule=constant", "train.epochs=2")
    stopped = train(f"stopped-{stop}", *constant, f"train.max_steps={stop}")
    assert len(losses_of(stopped)) == stop
    again = train(f"stopped-{stop}", *constant, resume="auto")
    assert again == stopped
    assert losses_of(again) == losses_of(whole)
    assert_same_ending(again, whole)
    assert json.loads((again / "summary.json").read_text())["finished"] is True


def test_resuming_a_finished_run_does_nothing(train: Train) -> None:
    folder = train("finished", "train.epochs=1")
    before = {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
    lines = (folder / "metrics.jsonl").read_text()
    train("finished", "train.epochs=1", resume="auto")
    assert (folder / "metrics.jsonl").read_text() == lines
    assert {path.name: path.read_bytes() for path in folder.glob("*.safetensors")} == before


def test_resuming_what_never_began_begins(train: Train) -> None:
    folder = train("fresh", "train.max_steps=2", resume="auto")
    assert len(losses_of(folder)) == 2


def test_a_table_goes_on_in_the_other_layout(train: Train, place: Path) -> None:
    begun = checkpoint(place / "runs" / "whole", STEPS)
    again = train("slots", "objective.layout=slots", resume=str(begun))
    assert [line["loss"] for line in lines_of(again)] == losses_of(place / "runs" / "whole")[STEPS:]
    found, wanted = (table_in(newest_checkpoint(folder)) for folder in (again, place / "runs" / "whole"))
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.seed=5", "run.seed: 0 there, 5 here"),
        ("train.batch=10", "train.batch: 9 there, 10 here"),
        ("model.name=mlp", "model.name: small_conv there, mlp here"),
        ("objective.name=ce", "objective.name: sop there, ce here"),
        ("objective.variant=paper objective.visits=null", "objective.variant: flow there, paper here"),
        ("optim.name=adamw", "optim.name: sgd there, adamw here"),
        ("data.balanced_per_epoch=20", "data.balanced_per_epoch: 0 there, 20 here"),
        ("data.labels=given", "labels: "),
        ("data.split=val data.labels=wrong", "samples: 61 there, 30 here"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_and_both_sides_are_named(
    train: Train, place: Path, capsys: pytest.CaptureFixture[str], override: str, message: str
) -> None:
    begun = checkpoint(place / "runs" / "whole", STEPS)
    name = override.partition("=")[2].partition(" ")[0]
    train(f"refused-{name}", *override.split(), resume=str(begun), code=1)
    told = capsys.readouterr().err
    assert f"{begun}: is of another run:" in told
    assert message in told
    assert "there, " in told
    assert "start a new one with another run.name" in told


def test_a_refused_resume_leaves_the_run_as_it_was(train: Train) -> None:
    folder = train("left-alone", "train.epochs=1")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    train("left-alone", "train.epochs=1", "model.name=mlp", resume="auto", code=1)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_going_back_forgets_what_came_after(train: Train) -> None:
    folder = train("back", "train.epochs=2", "checkpoint.keep=2")
    train("back", "train.epochs=2", "checkpoint.keep=2", "train.max_steps=9", resume=str(checkpoint(folder, STEPS)))
    assert [path.name for path in complete_checkpoints(folder)] == ["step-00000007", "step-00000009"]
    assert [line["step"] for line in lines_of(folder)] == list(range(1, 10))


def test_a_checkpoint_of_another_run_does_not_go_on_in_a_folder_that_holds_a_run(
    train: Train, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train("taken", "train.max_steps=2")
    train("taken", resume=str(checkpoint(place / "runs" / "whole", STEPS)), code=1)
    assert "is of another run, and runs/taken holds one already" in capsys.readouterr().err


def test_incomplete_checkpoints_do_not_count(place: Path, tmp_path: Path) -> None:
    assert find_checkpoint(tmp_path, "auto") is None
    assert find_checkpoint(tmp_path, "none") is None
    good = checkpoint(tmp_path, 7)
    shutil.copytree(checkpoint(place / "runs" / "whole", 7), good)
    shutil.copytree(good, tmp_path / "checkpoints" / "step-00000014.partial")
    checkpoint(tmp_path, 21).mkdir()
    assert find_checkpoint(tmp_path, "auto") == good
    assert find_checkpoint(Path("elsewhere"), str(tmp_path)) == good
    assert find_checkpoint(Path("elsewhere"), str(good)) == good


def test_a_checkpoint_that_is_not_there_is_an_error_of_the_option(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    train("nothing", resume="runs/nobody", code=1)
    assert "--resume runs/nobody: neither a checkpoint nor a run with one" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["network.safetensors", "optimizer.safetensors", "noise-0-of-1.safetensors"])
def test_a_damaged_file_of_a_checkpoint_is_named(
    train: Train, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    damaged = tmp_path / "step-00000007"
    shutil.copytree(checkpoint(place / "runs" / "whole", STEPS), damaged)
    content = (damaged / name).read_bytes()
    (damaged / name).write_bytes(content[: len(content) // 2])
    train(f"damaged-{name}", resume=str(damaged), code=1)
    assert f"{damaged / name}: cannot be read" in capsys.readouterr().err


def test_a_checkpoint_that_lacks_rows_or_is_of_another_format_is_refused(
    train: Train, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lacking = tmp_path / "step-00000007"
    shutil.copytree(checkpoint(place / "runs" / "whole", STEPS), lacking)
    (lacking / "noise-0-of-1.safetensors").unlink()
    train("lacking", resume=str(lacking), code=1)
    assert "has no rows of the noise table" in capsys.readouterr().err
    state = state_of(lacking) | {"format": 99, "sopdist": "7.0"}
    (lacking / "state.json").write_text(json.dumps(state))
    train("future", resume=str(lacking), code=1)
    told = capsys.readouterr().err
    assert "has format 99" in told
    assert "the sopdist that wrote it: 7.0" in told
    (lacking / "state.json").write_text("{")
    train("torn", resume=str(lacking), code=1)
    assert f"{lacking / 'state.json'}: cannot be read" in capsys.readouterr().err


def test_only_the_newest_checkpoints_are_kept_and_every_says_how_often(train: Train) -> None:
    folder = train("kept", "checkpoint.keep=2", "train.epochs=4")
    assert [path.name for path in complete_checkpoints(folder)] == ["step-00000021", "step-00000028"]
    folder = train("seldom", "checkpoint.every=2", "train.epochs=3", "checkpoint.keep=9")
    assert [path.name for path in complete_checkpoints(folder)] == ["step-00000014", "step-00000021"]
    folder = train("none", "checkpoint.every=0", "train.epochs=1")
    assert complete_checkpoints(folder) == []
    assert (folder / "network-last.safetensors").is_file()


def test_a_checkpoint_that_cannot_be_written_costs_a_warning_not_the_run(
    train: Train, place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = place / "runs" / "unlucky"
    folder.mkdir()
    (folder / "checkpoints").write_text("in the way")
    with caplog.at_level(logging.WARNING, "sopdist.train"):
        train("unlucky", "train.epochs=1")
    assert "COULD NOT SAVE, the run goes on" in caplog.text
    assert (folder / "network-last.safetensors").is_file()
    assert len(losses_of(folder)) == STEPS


def test_tensors_come_back_as_they_were_written(tmp_path: Path) -> None:
    tensors = {"a.b": torch.randn(3, 4).t(), "c": torch.tensor(7), "d": torch.zeros(0, 5, dtype=torch.int32)}
    write_tensors(tmp_path / "x.safetensors", tensors)
    found = read_tensors(tmp_path / "x.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


@pytest.mark.long
def test_a_run_goes_on_with_more_or_fewer_ranks_and_with_another_engine(place: Path) -> None:
    """One rank, two ranks of DDP, ZeRO 1, three ranks, and back to one: an epoch each, as one rank alone."""
    keys = ["--cfg", "small.yaml", "train.epochs=6", "optim.schedule=constant"]
    ended = run("python", [*keys, "run.name=constant"], place, 1)
    assert ended.code == 0, ended.told
    zero = ("engine.kind=deepspeed", "engine.zero=1")
    stages = [("python", 1, ()), ("torchrun", 2, ()), ("torchrun", 2, zero), ("torchrun", 3, ()), ("python", 1, ())]
    for epoch, (launcher, ranks, more) in enumerate(stages, 1):
        arguments = [*keys, "run.name=wanders", f"train.max_steps={epoch * STEPS}", *more, "--resume", "auto"]
        ended = run(launcher, arguments, place, ranks)
        assert ended.code == 0, ended.told
        written = newest_checkpoint(place / "runs" / "wanders")
        assert written.name == f"step-{epoch * STEPS:08d}"
        assert len(list(written.glob(f"noise-*-of-{ranks}.safetensors"))) == ranks
    whole, wandered = place / "runs" / "constant", place / "runs" / "wanders"
    assert losses_of(wandered) == pytest.approx(losses_of(whole)[: 5 * STEPS], rel=1e-4)
    found, wanted = table_in(newest_checkpoint(wandered)), table_in(checkpoint(whole, 5 * STEPS))
    assert torch.equal(found["visits"], wanted["visits"])
    for name in ("u", "v"):
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-3, atol=1e-5)
