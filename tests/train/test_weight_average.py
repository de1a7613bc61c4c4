"""The moving average of the weights (train.ema): its rule, its evaluation, its files, and old names of the setting."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from sopdist.checkpoint import complete_checkpoints, open_checkpoint
from sopdist.checkpoint.tensor_file import read_tensors
from sopdist.cli import main
from sopdist.cli.commands.checkpoint_export import _method_of
from sopdist.errors import ConfigError
from sopdist.methods.elr_plus import ELRPlusSettings
from sopdist.train.config import load
from sopdist.train.distributed.launch_env import LaunchEnv
from sopdist.train.distributed.world import open_world
from sopdist.train.engine import Engine, make_engine
from sopdist.train.run import run_config
from sopdist.train.settings import EngineSettings, TrainSettings
from sopdist.train.weight_average import WeightAverage
from tests.support.grey_images import write_images
from tests.support.records import lines_of, losses_of

DECAY = 0.75
CONFIG = """
data: {root: shards, split: train, recipe: digits, labels: wrong, backend: cpu, threads: 1}
model: {name: small_conv}
method: {name: ce}
optim: {lr: 0.05, schedule: constant}
train: {epochs: 3, batch: 9, ema: 0.8}
engine: {threads: 1}
evaluate: {splits: {val: val}}
checkpoint: {steps: 4, keep: 100}
log: {every: 1, wandb: 'off'}
"""

# -- the rule ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def engine() -> Iterator[Engine]:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    settings = EngineSettings(kind="single", threads=1)
    world = open_world(LaunchEnv(), settings)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    yield make_engine(world, settings, network, optimizer, accumulate=1, clip=0.0, batch=6)
    world.close()


def train_steps(engine: Engine, steps: int) -> Iterator[None]:
    for step in range(steps):
        images = torch.randn(6, 3, generator=torch.Generator().manual_seed(step)) + 1
        with engine.micro_batch(last=True):
            engine.backward(engine.forward(images).square().sum())
        engine.step()
        yield


def in_float64(engine: Engine) -> dict[str, Tensor]:
    return {name: value.double() for name, value in engine.network_state().items()}


def test_the_average_follows_weights_and_batch_statistics(engine: Engine) -> None:
    """decay average + (1 - decay) current, in float64; counts are copied."""
    average = WeightAverage(engine, DECAY)
    expected = in_float64(engine)
    for _ in train_steps(engine, 5):
        average.update()
        for name, value in in_float64(engine).items():
            copied = name.endswith("num_batches_tracked")
            expected[name] = value if copied else DECAY * expected[name] + (1 - DECAY) * value
    found = average.weights | average.statistics
    assert found.keys() == expected.keys()
    assert {"1.running_mean", "1.running_var"} == average.statistics.keys()
    for name, value in found.items():
        torch.testing.assert_close(value.double(), expected[name], rtol=1e-5, atol=1e-6)
    assert int(found["1.num_batches_tracked"]) == 5


def test_the_network_has_the_average_only_while_it_is_in_use(engine: Engine) -> None:
    average = WeightAverage(engine, DECAY)
    for _ in train_steps(engine, 3):
        average.update()
    raw, kept = engine.network_state(), {name: value.clone() for name, value in average.weights.items()}
    with suppress(KeyboardInterrupt), average.in_use():
        inside = engine.network_state()
        raise KeyboardInterrupt
    assert all(torch.equal(inside[name], value) for name, value in (average.weights | average.statistics).items())
    after = engine.network_state()
    assert all(torch.equal(after[name], value) for name, value in raw.items()), "restored after an error, too"
    assert all(torch.equal(average.weights[name], value) for name, value in kept.items())


def test_an_average_of_another_network_is_refused(engine: Engine) -> None:
    average = WeightAverage(engine, DECAY)
    weights = {name: value for name, value in average.weights.items() if name != "2.bias"}
    with pytest.raises(ValueError, match=r"2\.bias is missing, or belongs to another network"):
        average.load(weights, average.statistics)


# -- runs --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_images(tmp_path / "shards" / "train", 61)
    write_images(tmp_path / "shards" / "val", 30)
    (tmp_path / "ema.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def evaluations(run: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if "/" in key} for line in lines_of(run, "eval")]


def test_the_average_is_evaluated_and_saved_and_changes_nothing_else(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_config("ema.yaml", ["run.name=with"]) == 0
    assert run_config("ema.yaml", ["run.name=without", "train.ema=0"]) == 0
    averaged, raw = workspace / "runs" / "with", workspace / "runs" / "without"
    assert losses_of(averaged) == losses_of(raw)
    weights = [read_tensors(run / "network-last.safetensors") for run in (averaged, raw)]
    assert all(torch.equal(weights[0][name], value) for name, value in weights[1].items())
    assert not (raw / "network-last-ema.safetensors").exists()
    with_ema, without = evaluations(averaged), evaluations(raw)
    assert [{key: value for key, value in line.items() if "_ema/" not in key} for line in with_ema] == without
    assert len(with_ema) == 3
    assert all("val_ema/top1" in line for line in with_ema)

    average = read_tensors(averaged / "network-last-ema.safetensors")
    assert average.keys() == weights[0].keys()
    assert any(not torch.equal(value, weights[0][name]) for name, value in average.items())
    capsys.readouterr()
    for which, key in (("ema", "val_ema/top1"), ("last", "val/top1")):
        assert main(["eval", "runs/with", "--which", which, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["val"]["top1"] == with_ema[-1][key]
    assert main(["eval", "runs/without", "--which", "ema"]) == 1
    assert "trained without train.ema" in capsys.readouterr().err


def test_a_resumed_run_has_the_same_average(workspace: Path) -> None:
    assert run_config("ema.yaml", ["run.name=whole"]) == 0
    assert run_config("ema.yaml", ["run.name=cut", "train.max_steps=10"]) == 0  # in the middle of the second epoch
    assert run_config("ema.yaml", ["run.name=cut"], resume="auto") == 0
    whole, cut = (workspace / "runs" / name for name in ("whole", "cut"))
    first, second = (read_tensors(run / "network-last-ema.safetensors") for run in (whole, cut))
    assert all(torch.equal(first[name], value) for name, value in second.items())
    assert evaluations(cut)[-1] == evaluations(whole)[-1]
    saved = [open_checkpoint(complete_checkpoints(run)[-1]) for run in (whole, cut)]
    names = [name for name in saved[0].tensors if "average/" in name]
    assert any(name.startswith("average/") for name in names)
    assert all(torch.equal(saved[0].read(name), saved[1].read(name)) for name in names)


def test_an_average_that_is_added_on_resume_starts_from_the_weights_there(workspace: Path) -> None:
    assert run_config("ema.yaml", ["run.name=late", "train.ema=0", "train.max_steps=14"]) == 0
    added = ["train.ema=0.5", "train.max_steps=17", "checkpoint.steps=1"]
    assert run_config("ema.yaml", ["run.name=late", *added], resume="auto") == 0
    saved = {at.step: at for at in map(open_checkpoint, complete_checkpoints(workspace / "runs" / "late"))}
    assert not saved[14].section("average/")
    expected = {name: value.double() for name, value in saved[14].section("network/").items()}
    for step in (15, 16, 17):
        for name, value in saved[step].section("network/").items():
            expected[name] = (expected[name] + value.double()) / 2
        for name, value in saved[step].section("average/").items():
            if value.is_floating_point():
                torch.testing.assert_close(value.double(), expected[name], rtol=1e-5, atol=1e-6)


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("workspace")
def test_zero_3_is_refused_with_the_reason() -> None:
    engine = ["engine.kind=deepspeed", "engine.zero=3"]
    with pytest.raises(ConfigError, match=r"train\.ema = 0\.8: needs full weights on every rank .* engine\.zero = 3"):
        load("ema.yaml", engine)
    load("ema.yaml", [*engine, "train.ema=0"])
    load("ema.yaml", ["engine.kind=deepspeed", "engine.zero=2"])


@pytest.mark.parametrize("value", [-0.1, 1.0, float("nan")])
def test_a_decay_out_of_range_is_refused_by_name(value: float) -> None:
    with pytest.raises(ConfigError, match=r"train\.ema = "):
        TrainSettings(epochs=1, batch=1, ema=value)


def write_config(folder: Path, **sections: Any) -> str:
    tree = yaml.safe_load(CONFIG)
    del tree["train"]["ema"]
    for name, section in sections.items():
        tree[name] = tree.get(name, {}) | section if name == "train" else section
    path = folder / "old.yaml"
    path.write_text(yaml.safe_dump(tree))
    return str(path)


@pytest.mark.parametrize("method", [{"ema": 0.9}, {"name": "sop", "ema": 0.9, "mixup": 0.5}])
def test_a_config_with_the_old_key_loads_with_a_note_that_names_the_new_one(
    tmp_path: Path, method: dict[str, Any]
) -> None:
    notes: list[str] = []
    config = load(write_config(tmp_path, method=method), note=notes.append)
    assert config.train.ema == 0.9
    assert config.method.name == "sop"
    assert any("`method.ema` has moved to `train.ema`; please update the file" in note for note in notes)
    both = load(write_config(tmp_path, method=method, train={"ema": 0.5}), note=notes.append)
    assert both.train.ema == 0.5, "the new key counts"


def test_an_override_with_the_old_key_is_understood_with_a_note(tmp_path: Path) -> None:
    notes: list[str] = []
    config = load(write_config(tmp_path, method={"name": "sop"}), ["method.ema=0.9"], notes.append)
    assert config.train.ema == 0.9
    assert any("train.ema" in note for note in notes)


def test_a_checkpoint_whose_config_has_the_old_key_can_be_exported() -> None:
    """Every checkpoint of SOP has it: the config in a checkpoint lists all settings."""
    assert _method_of({"method": {"name": "sop", "mixup": 0.0, "ema": 0.0}}).name == "sop"


def test_the_average_of_elr_plus_is_its_own(tmp_path: Path) -> None:
    notes: list[str] = []
    for section, overrides in (({"ema": 0.9}, []), ({}, ["method.ema=0.9"])):
        config = load(write_config(tmp_path, method={"name": "elr_plus"} | section), overrides, notes.append)
        assert config.method == ELRPlusSettings(ema=0.9)
        assert config.train.ema == 0
    assert notes == []
