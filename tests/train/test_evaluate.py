"""Evaluation counts every sample exactly once, on any number of ranks; and `sopdist eval`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from sopdist.cli import main
from sopdist.cli.commands.eval import named_splits
from sopdist.data.augment.recipes import RECIPES
from sopdist.data.labels import UNKNOWN, write_labels
from sopdist.data.settings import DataSettings
from sopdist.errors import ConfigError, DataError
from sopdist.train.distributed.world import LaunchEnv, World, open_world
from sopdist.train.evaluate import data_of_split, evaluate, open_evaluations
from sopdist.train.run import run_config
from sopdist.train.settings import EngineSettings, EvaluateSettings
from tests.support.evaluate_worker import BATCHES, evaluations, network
from tests.support.grey_images import CLASSES, pixels_of, write_images
from tests.support.launching import launch
from tests.support.small_splits import write_split

SAMPLES, BROKEN, UNLABELLED = 53, (17,), (3, 40, 52)

Eval = Callable[..., dict[str, dict[str, float]]]


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """53 images, one of which cannot be read, and three of which have no label in the set `partial`."""
    folder = tmp_path_factory.mktemp("split") / "all"
    manifest = write_images(folder, SAMPLES, BROKEN)
    labels = np.arange(SAMPLES) % len(CLASSES)
    labels[list(UNLABELLED)] = UNKNOWN
    write_labels(folder, manifest, "partial", labels, {"kind": "test"})
    return folder


@pytest.fixture
def alone() -> Iterator[World]:
    world = open_world(LaunchEnv(), EngineSettings(threads=1))
    yield world
    world.close()


def by_hand(labels: str) -> dict[str, float]:
    """Image by image, through nothing but torch."""
    top1 = top5 = samples = 0
    loss, model, recipe = 0.0, network(), RECIPES["digits"]
    for index in range(SAMPLES):
        if index in BROKEN or (labels == "partial" and index in UNLABELLED):
            continue
        label = index % len(CLASSES)
        image = torch.from_numpy((pixels_of(index) / 255 - recipe.mean[0]) / recipe.std[0]).float()
        logits = model(image[None, None])[0].detach()
        order = logits.argsort(descending=True).tolist()
        top1, top5, samples = top1 + (order[0] == label), top5 + (label in order[:5]), samples + 1
        loss += float(F.cross_entropy(logits[None], torch.tensor([label])))
    return {"top1": top1 / samples, "top5": top5 / samples, "samples": samples, "loss": loss / samples}


def assert_exact(found: dict[str, dict[str, float]], labels: str) -> None:
    wanted = by_hand(labels)
    assert 0 < wanted["top1"] < wanted["top5"] < 1
    assert set(found) == {str(batch) for batch in BATCHES}
    for values in found.values():
        assert values["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
        assert {**values, "loss": 0} == {**wanted, "loss": 0}  # counts: exactly


@pytest.mark.parametrize("labels", ["given", "partial"])
def test_one_rank_counts_what_is_counted_by_hand(alone: World, split: Path, labels: str) -> None:
    assert_exact(evaluations(alone, split, labels), labels)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_together_count_what_is_counted_by_hand(split: Path, tmp_path: Path, ranks: int) -> None:
    ended = launch(
        "torchrun", "tests.support.evaluate_worker", [str(split), "partial", str(tmp_path)], ranks, timeout=120
    )
    assert ended.returncode == 0, ended.stderr[-5000:]
    for rank in range(ranks):
        assert_exact(json.loads((tmp_path / f"rank{rank}.json").read_text()), "partial")


def test_a_split_with_other_classes_is_refused_by_its_name(alone: World, split: Path) -> None:
    settings, data = EvaluateSettings({"val": str(split)}), DataSettings("unused", "digits", threads=1)
    with pytest.raises(ConfigError, match=r"evaluate\.splits\.val: has 7 classes, but the training split has 3"):
        open_evaluations(settings, data, ("a", "b", "c"), 12, alone)


def test_up_to_five_classes_have_no_top_5(alone: World, tmp_path: Path) -> None:
    write_split(tmp_path / "pets")
    data = DataSettings(str(tmp_path), "cifar10", threads=1)
    streams = open_evaluations(EvaluateSettings({"pets": "pets"}), data, ("cat", "dog", "owl"), 5, alone)
    found = evaluate(lambda images: images.mean((2, 3)), streams["pets"], alone)
    streams["pets"].close()
    assert set(found) == {"top1", "loss", "samples"}
    assert found["samples"] == 12


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two epochs that evaluated after each."""
    folder = tmp_path_factory.mktemp("trained")
    write_images(folder / "shards" / "train", 60)
    write_images(folder / "shards" / "val", 31)
    write_images(folder / "elsewhere" / "train", 60)
    write_images(folder / "elsewhere" / "test", 45)
    (folder / "small.yaml").write_text(
        "data: {root: shards, split: train, recipe: digits, labels: given, threads: 1}\n"
        "model: {name: mlp}\n"
        "train: {epochs: 2, batch: 16}\n"
        "engine: {threads: 1}\n"
        "evaluate: {splits: {val: val}}\n"
        "log: {wandb: 'off'}\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run_config("small.yaml") == 0
    return folder


@pytest.fixture
def evaluated(trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Eval:
    """`sopdist eval ARGUMENTS --json` in the folder of the run."""

    def call(*arguments: str) -> dict[str, dict[str, float]]:
        monkeypatch.chdir(trained)
        capsys.readouterr()
        assert main(["eval", *arguments, "--json"]) == 0
        found: dict[str, dict[str, float]] = json.loads(capsys.readouterr().out)
        return found

    return call


def test_eval_finds_again_what_the_run_has_told(evaluated: Eval, trained: Path) -> None:
    told = [json.loads(line) for line in (trained / "runs/small/metrics.jsonl").read_text().splitlines()]
    evals = [line for line in told if line["kind"] == "eval"]
    last = evaluated("runs/small", "--which", "last")
    assert last["network"] == "runs/small/network-last.safetensors"
    assert last["val"]["top1"] == evals[-1]["val/top1"]
    assert last["val"]["loss"] == pytest.approx(evals[-1]["val/loss"], rel=1e-6)
    assert last["val"]["samples"] == 31
    best = evaluated("runs/small")
    assert best["network"] == "runs/small/network-best.safetensors"
    assert best["val"]["top1"] == max(line["val/top1"] for line in evals)
    first = min((trained / "runs/small/checkpoints").iterdir())
    assert evaluated(str(first.relative_to(trained)))["val"]["loss"] == pytest.approx(evals[0]["val/loss"], rel=1e-6)


def test_eval_takes_other_splits_labels_batches_and_places(evaluated: Eval, trained: Path) -> None:
    found = evaluated("runs/small", "--split", "train", "--split", "far=elsewhere/test", "--split", "elsewhere/test")
    assert {name: found[name]["samples"] for name in ("train", "far", "test")} == {"train": 60, "far": 45, "test": 45}
    assert found["far"] == found["test"]
    assert found["train"]["top1"] > evaluated("runs/small", "--split", "train", "--labels", "wrong")["train"]["top1"]
    assert evaluated("runs/small", "--split", "train", "--batch", "7")["train"]["top1"] == found["train"]["top1"]
    moved = evaluated("runs/small", "--root", str(trained / "elsewhere"), "--split", "test")
    assert moved["test"] == found["test"]


def test_eval_prints_a_table(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(trained)
    assert main(["eval", "runs/small"]) == 0
    network_line, head, _, row = capsys.readouterr().out.splitlines()[-4:]
    assert network_line.endswith("network-best.safetensors")
    assert head.split() == ["split", "top-1", "top-5", "loss", "samples"]
    assert row.split()[0] == "val"
    assert row.split()[-1] == "31"


def test_eval_on_two_ranks_finds_what_one_finds_and_says_it_once(evaluated: Eval, trained: Path) -> None:
    ended = launched(trained, "--split", str(trained / "elsewhere/test"), "--json")
    assert ended.returncode == 0, ended.stderr[-5000:]
    found = json.loads(ended.stdout)
    wanted = evaluated("runs/small", "--split", "elsewhere/test")["test"]
    assert found["test"]["loss"] == pytest.approx(wanted["loss"], rel=1e-6)
    assert {**found["test"], "loss": 0} == {**wanted, "loss": 0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--split", "tset"], "shards/tset"),  # while the ranks open things
        (["--split", "half"], "samples could not be read in epoch 0"),  # while one of them evaluates
    ],
)
def test_an_error_of_eval_on_two_ranks_is_told_once(trained: Path, arguments: list[str], message: str) -> None:
    """Only rank 1 finds that it cannot read what it should: it has the columns from 8 on."""
    write_images(trained / "shards" / "half", 31, broken=tuple(range(8, 16)))
    ended = launched(trained, *arguments)
    assert ended.returncode == 1
    assert ended.stdout == ""
    told = [line for line in ended.stderr.splitlines() if line.startswith("sopdist: ")]
    assert len(told) == 1, ended.stderr[-5000:]
    assert message in told[0]
    assert told[0].startswith("sopdist: rank 1: ") == ("half" in arguments)
    assert "sopdist/cli/commands/eval.py" not in ended.stderr, "a traceback; torchrun's own is not ours"


def launched(trained: Path, *arguments: str) -> CompletedProcess[str]:
    """`sopdist eval` of the run on two ranks."""
    place = ["runs/small", "--root", "shards"]
    absolute = [str(trained / part) if "/" in part or part == "shards" else part for part in place]
    return launch("torchrun", "sopdist", ["eval", *absolute, *arguments], timeout=120)


def test_a_run_without_a_best_network_has_its_last_evaluated(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(trained)
    for name in ("config.yaml", "network-last.safetensors"):
        (tmp_path / name).write_bytes((trained / "runs/small" / name).read_bytes())
    assert main(["eval", str(tmp_path)]) == 0
    assert f"{tmp_path}/network-last.safetensors" in capsys.readouterr().out.splitlines()
    assert main(["eval", str(tmp_path), "--which", "best"]) == 1
    assert "has no network-best.safetensors" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("split", "location"),
    [
        ("val", "shards/val"),
        ("far/val", "far/val"),
        ("s3://far/val", "s3://far/val"),
        ("pipe:fetch {}", "pipe:fetch {}"),
    ],
)
def test_a_split_is_a_folder_of_the_root_or_a_place_of_its_own(split: str, location: str) -> None:
    assert data_of_split(DataSettings("shards", "digits", split="train"), split).location == location


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["runs"], 1, "runs: neither a run nor a checkpoint"),
        (["nowhere"], 1, "nowhere: neither a run nor a checkpoint"),
        (["runs/small", "--split", "tset"], 1, "shards/tset"),
        (["runs/small", "--labels", "cleen"], 1, "cleen"),
        (["runs/small", "--root", "moved"], 1, "moved/"),
        (["runs/small", "--which", "newest"], 2, "invalid choice: 'newest'"),
        (["runs/small", "--batch", "0"], 2, "--batch"),
    ],
)
def test_eval_of_what_is_not_there_says_what_is_missing(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    arguments: list[str], code: int, message: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(trained)
    try:
        found = main(["eval", *arguments])
    except SystemExit as error:  # argparse's own
        found = int(str(error.code))
    assert found == code
    assert message in capsys.readouterr().err


def test_eval_of_a_run_without_a_network_yet_says_what_to_do(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_bytes((trained / "runs/small/config.yaml").read_bytes())
    assert main(["eval", str(tmp_path)]) == 1
    assert "name one of its checkpoints, or let the run finish" in capsys.readouterr().err


def test_eval_of_damaged_or_foreign_weights_names_the_file(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(trained)
    config = (trained / "runs/small/config.yaml").read_text()
    (tmp_path / "config.yaml").write_text(config.replace("name: mlp", "name: small_conv"))
    weights = (trained / "runs/small/network-last.safetensors").read_bytes()
    (tmp_path / "network-last.safetensors").write_bytes(weights)
    assert main(["eval", str(tmp_path)]) == 1
    assert "network-last.safetensors: does not fit model.name = small_conv" in capsys.readouterr().err
    (tmp_path / "network-last.safetensors").write_bytes(weights[:100])
    assert main(["eval", str(tmp_path)]) == 1
    assert "network-last.safetensors: cannot be read" in capsys.readouterr().err


def test_names_of_splits() -> None:
    assert named_splits(["test", "imagenet=a/b", "a/c/"]) == {"test": "test", "imagenet": "a/b", "c": "a/c/"}


def test_a_missing_label_set_is_an_error_of_data(alone: World, split: Path) -> None:
    settings = EvaluateSettings({"val": str(split)}, "nobody")
    with pytest.raises(DataError, match="nobody"):
        open_evaluations(settings, DataSettings("unused", "digits", threads=1), CLASSES, 12, alone)
