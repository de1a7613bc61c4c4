"""The interface carries a method that is unlike the built-in ones: two networks, rows both ways, state, a readout.

The trainer, its checkpoints and commands know nothing about it.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from sopdist.checkpoint import Checkpoint, complete_checkpoints, open_checkpoint
from sopdist.checkpoint.tensor_file import read_tensors
from sopdist.cli import main
from sopdist.data.batch import Batch
from sopdist.methods import METHODS
from sopdist.methods.method import Forward, StepOutput
from sopdist.models.exported import load_exported
from sopdist.train.record.metrics_file import read_lines
from sopdist.train.run import run_config
from tests.support.grey_images import write_images
from tests.support.launching import launch
from tests.support.pair_method import LEFT_OUT, PairMethod

CONFIG = """
data: {root: shards, split: train, recipe: digits, labels: wrong, backend: cpu, threads: 1}
model: {name: small_conv}
method: {name: pair, agreement: 0.25}
optim: {lr: 0.05, schedule: constant}
train: {epochs: 3, batch: 9}
engine: {threads: 1}
evaluate: {splits: {val: val}}
checkpoint: {steps: 4, keep: 100}
log: {every: 1, wandb: 'off'}
"""
SAMPLES = 61


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_images(tmp_path / "shards" / "train", SAMPLES)
    write_images(tmp_path / "shards" / "val", 30)
    (tmp_path / "pair.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(METHODS, "pair", PairMethod)
    return tmp_path


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in read_lines(run / "metrics.jsonl") if line["kind"] == "train"]


def assert_same_end(one: Path, other: Path) -> None:
    first, second = (complete_checkpoints(run)[-1] for run in (one, other))
    a, b = open_checkpoint(first), open_checkpoint(second)
    assert a.tensors.keys() == b.tensors.keys()
    for name in a.tensors:
        assert torch.equal(a.read(name), b.read(name)), name


def assert_visits(saved: Checkpoint) -> None:
    """All samples in the first epoch, then only those that the method kept."""
    visits, kept = saved.table("mean")["visits"], saved.read("method/kept")
    left_out = SAMPLES // LEFT_OUT
    assert int(kept.sum()) == SAMPLES - left_out
    assert set(visits.tolist()) <= {1, 2, 3}
    assert int(visits.sum()) == 3 * SAMPLES - 2 * left_out
    assert set(visits[kept == 1].tolist()) <= {2, 3}, "visited in the last epoch"


def test_a_pair_of_networks_with_its_own_table_trains_saves_and_resumes_exactly(workspace: Path) -> None:
    assert run_config("pair.yaml", ["run.name=whole"]) == 0
    whole = workspace / "runs" / "whole"
    assert run_config("pair.yaml", ["run.name=cut", "train.max_steps=10"]) == 0  # in the middle of the second epoch
    assert run_config("pair.yaml", ["run.name=cut"], resume="auto") == 0
    cut = workspace / "runs" / "cut"
    assert losses(cut) == losses(whole)
    assert_same_end(whole, cut)
    saved = open_checkpoint(complete_checkpoints(whole)[-1])
    assert saved.table_names == ["mean"]
    assert_visits(saved)
    assert saved.read("method/mean_loss").item() > 0
    network = read_tensors(whole / "network-last.safetensors")
    assert {name.split(".")[0] for name in network} == {"first", "second"}
    lines = list(read_lines(whole / "metrics.jsonl"))
    assert losses(whole)[-1] < losses(whole)[0]
    noise = [line for line in lines if line["kind"] == "noise"][-1]
    assert noise["rows"] == SAMPLES
    assert 0 < noise["flagged"] < SAMPLES
    with (whole / "suspects.csv").open() as file:
        assert len(list(csv.DictReader(file))) == SAMPLES


def test_commands_work_for_a_method_that_they_do_not_know(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_config("pair.yaml", ["run.name=whole"]) == 0
    summary = json.loads((workspace / "runs" / "whole" / "summary.json").read_text())
    capsys.readouterr()
    assert main(["eval", "runs/whole", "--which", "last", "--json"]) == 0
    evaluated = json.loads(capsys.readouterr().out)
    assert evaluated["val"]["top1"] == summary["last"]["val/top1"], "the pair averages in both"
    assert main(["plan", "--cfg", "pair.yaml", "--world-size", "2", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["method"] == {"name": "pair", "forward_passes": 2}
    assert plan["tables"][0]["nbytes"] == SAMPLES * (8 * 7 + 2)
    assert plan["exchange"]["row_bytes"] == plan["exchange"]["fact_bytes"] == 8 * 7 + 2
    assert main(["checkpoint", "verify", "runs/whole"]) == 0
    assert main(["checkpoint", "show", "runs/whole"]) == 0
    assert main(["checkpoint", "export", "runs/whole", "--what", "network", "--out", "exported"]) == 0
    weights = read_tensors(workspace / "runs" / "whole" / "network-last.safetensors")
    first = {name.removeprefix("first."): value for name, value in weights.items() if name.startswith("first.")}
    exported = load_exported("exported").state_dict()
    assert exported.keys() == first.keys()
    assert all(torch.equal(exported[name], value) for name, value in first.items())
    assert main(["checkpoint", "reshard", "runs/whole", "--ranks", "3", "--out", "three"]) == 0
    saved = open_checkpoint(complete_checkpoints(workspace / "runs" / "whole")[-1])
    for name, column in saved.table("mean").items():
        if name != "meta":
            assert torch.equal(open_checkpoint(workspace / "three").table("mean")[name], column)


@pytest.mark.usefixtures("workspace")
def test_a_setting_in_the_fingerprint_of_a_method_cannot_change_on_resume(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_config("pair.yaml", ["run.name=whole", "train.max_steps=5"]) == 0
    capsys.readouterr()
    assert run_config("pair.yaml", ["run.name=whole", "method.agreement=0.5"], resume="auto") == 1
    assert "method.agreement: 0.25 in the checkpoint, 0.5 in this run" in capsys.readouterr().err
    assert run_config("pair.yaml", ["run.name=whole"], resume="auto") == 0
    assert run_config("pair.yaml", ["run.name=other", "method.name=ce"]) == 2, "agreement belongs to pair"


@pytest.mark.usefixtures("workspace")
def test_a_run_that_continues_with_another_method_starts_without_the_state_of_the_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Single(PairMethod):
        def build_network(self, make: Callable[[], nn.Module]) -> nn.Module:
            return make()

        def step(self, forward: Forward, batch: Batch) -> StepOutput:
            return super().step(lambda images: forward(images).expand(2, -1, -1), batch)

        def predict(self, forward: Forward, images: Tensor) -> Tensor:
            return forward(images)

    monkeypatch.setitem(METHODS, "pair", Single)
    assert run_config("pair.yaml", ["run.name=first", "method={name: ce}", "train.max_steps=9"]) == 0
    change = ["method.name"]
    assert run_config("pair.yaml", ["run.name=first"], resume="auto", allow_change=change) == 0, capsys.readouterr().err


@pytest.mark.long
def test_a_pair_resumes_exactly_on_two_ranks(workspace: Path) -> None:
    """Every sample is visited once per epoch, and a resumed run ends as the one that was never stopped."""
    config = str(workspace / "pair.yaml")
    where = [f"data.root={workspace / 'shards'}", f"run.folder={workspace / 'runs'}"]

    def train(*words: str) -> None:
        ended = launch("torchrun", "tests.support.pair_method", [config, *where, *words], 2)
        assert ended.returncode == 0, ended.stderr[-3000:]

    train("run.name=many")
    many = workspace / "runs" / "many"
    saved = open_checkpoint(complete_checkpoints(many)[-1])
    assert_visits(saved)
    train("run.name=cut", "train.max_steps=10")
    train("run.name=cut", "--resume")
    assert losses(workspace / "runs" / "cut") == losses(many)
    assert_same_end(many, workspace / "runs" / "cut")


# -- stages, and epochs of different lengths ---------------------------------------------------------------------------


@pytest.mark.usefixtures("workspace")
@pytest.mark.parametrize(("method", "key"), [("forward", "first_epochs"), ("cores2_star", "sieve_epochs")])
def test_a_stage_does_not_move_when_a_run_is_prolonged(
    method: str, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["run.name=staged", f"method={{name: {method}}}"]
    assert run_config("pair.yaml", [*common, "train.epochs=4", "train.max_steps=9"]) == 0
    capsys.readouterr()
    assert run_config("pair.yaml", [*common, "train.epochs=9"], resume="auto") == 1
    assert f"method.{key}: " in capsys.readouterr().err
    before = {"forward": 2, "cores2_star": 1}[method]
    assert run_config("pair.yaml", [*common, "train.epochs=9", f"method.{key}={before}"], resume="auto") == 0


@pytest.mark.usefixtures("workspace")
@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("{name: forward, first_epochs: 3}", "method.first_epochs = 3: must be less than train.epochs = 3"),
        ("{name: cores2_star, sieve_epochs: 5}", "method.sieve_epochs = 5: must be less than train.epochs = 3"),
        ("{name: dividemix, warmup: 100}", "method.warmup = 100: must be less than train.epochs = 3"),
    ],
)
def test_a_first_stage_that_takes_the_whole_run_is_refused(
    method: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_config("pair.yaml", ["run.name=refused", f"method={method}"]) != 0
    assert message in capsys.readouterr().err


def test_an_epoch_of_fewer_steps_covers_the_same_part_of_the_schedule(workspace: Path) -> None:
    """DivideMix: 7 steps in the warm-up; later as many as labelled samples need, at most 16."""
    words = ["run.name=cosine", "method={name: dividemix}", "optim.schedule=cosine"]
    assert run_config("pair.yaml", words) == 0
    lines = [line for line in read_lines(workspace / "runs" / "cosine" / "metrics.jsonl") if line["kind"] == "train"]
    by_epoch = [[line["lr"] for line in lines if line["epoch"] == epoch] for epoch in range(3)]
    assert len(by_epoch[0]) == 7
    for epoch, rates in enumerate(by_epoch):
        for position, rate in enumerate(rates):
            share = (epoch + position / len(rates)) / 3
            assert rate == pytest.approx(0.05 * (1 + math.cos(math.pi * share)) / 2)


def test_a_checkpoint_has_one_network(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run_config("pair.yaml", ["run.name=averaged", "method={name: ce}", "train.ema=0.5", "train.max_steps=4"]) == 0
    )
    (checkpoint,) = complete_checkpoints(workspace / "runs" / "averaged")
    capsys.readouterr()
    assert main(["eval", str(checkpoint), "--which", "ema"]) == 1
    assert "is a checkpoint, which has one network" in capsys.readouterr().err
