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
def one_rank() -> Iterator[World]:
    world = open_world(LaunchEnv(), EngineSettings(threads=1))
    yield world
    world.close()


def expected_metrics(labels: str) -> dict[str, float]:
    """The metrics of the split, computed image by image in plain torch."""
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
    wanted = expected_metrics(labels)
    assert 0 < wanted["top1"] < wanted["top5"] < 1
    assert set(found) == {str(batch) for batch in BATCHES}
    for values in found.values():
        assert values["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
        assert {**values, "loss": 0} == {**wanted, "loss": 0}  # counts are exact


@pytest.mark.parametrize("labels", ["given", "partial"])
def test_one_rank_gets_the_expected_metrics(one_rank: World, split: Path, labels: str) -> None:
    assert_exact(evaluations(one_rank, split, labels), labels)


@pytest.mark.parametrize("ranks", [2, 3])
def test_several_ranks_get_the_expected_metrics(split: Path, tmp_path: Path, ranks: int) -> None:
    ended = launch(
        "torchrun", "tests.support.evaluate_worker", [str(split), "partial", str(tmp_path)], ranks, timeout=120
    )
    assert ended.returncode == 0, ended.stderr[-5000:]
    for rank in range(ranks):
        assert_exact(json.loads((tmp_path / f"rank{rank}.json").read_text()), "partial")


def test_a_split_with_other_classes_is_refused_by_name(one_rank: World, split: Path) -> None:
    settings, data = EvaluateSettings({"val": str(split)}), DataSettings("unused", "digits", threads=1)
    with pytest.raises(ConfigError, match=r"evaluate\.splits\.val: has 7 classes, but the training split has 3"):
        open_evaluations(settings, data, ("a", "b", "c"), 12, one_rank)


def test_with_up_to_five_classes_there_is_no_top_5(one_rank: World, tmp_path: Path) -> None:
    write_split(tmp_path / "pets")
    data = DataSettings(str(tmp_path), "cifar10", threads=1)
    streams = open_evaluations(EvaluateSettings({"pets": "pets"}), data, ("cat", "dog", "owl"), 5, one_rank)
    found = evaluate(lambda images: images.mean((2, 3)), streams["pets"], one_rank)
    streams["pets"].close()
    assert set(found) == {"top1", "loss", "samples"}
    assert found["samples"] == 12


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two epochs, each followed by an evaluation."""
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
def run_eval(trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Eval:
    """Call `sopdist eval ARGUMENTS --json` in the folder of the run; returns the parsed output."""

    def call(*arguments: str) -> dict[str, dict[str, float]]:
        monkeypatch.chdir(trained)
        capsys.readouterr()
        assert main(["eval", *arguments, "--json"]) == 0
        found: dict[str, dict[str, float]] = json.loads(capsys.readouterr().out)
        return found

    return call


def test_eval_reproduces_the_metrics_of_the_run(run_eval: Eval, trained: Path) -> None:
    lines = [json.loads(line) for line in (trained / "runs/small/metrics.jsonl").read_text().splitlines()]
    evals = [line for line in lines if line["kind"] == "eval"]
    last = run_eval("runs/small", "--which", "last")
    assert last["network"] == "runs/small/network-last.safetensors"
    assert last["val"]["top1"] == evals[-1]["val/top1"]
    assert last["val"]["loss"] == pytest.approx(evals[-1]["val/loss"], rel=1e-6)
    assert last["val"]["samples"] == 31
    best = run_eval("runs/small")
    assert best["network"] == "runs/small/network-best.safetensors"
    assert best["val"]["top1"] == max(line["val/top1"] for line in evals)
    first = min((trained / "runs/small/checkpoints").iterdir())
    assert run_eval(str(first.relative_to(trained)))["val"]["loss"] == pytest.approx(evals[0]["val/loss"], rel=1e-6)


def test_eval_accepts_other_splits_labels_batch_sizes_and_roots(run_eval: Eval, trained: Path) -> None:
    found = run_eval("runs/small", "--split", "train", "--split", "far=elsewhere/test", "--split", "elsewhere/test")
    assert {name: found[name]["samples"] for name in ("train", "far", "test")} == {"train": 60, "far": 45, "test": 45}
    assert found["far"] == found["test"]
    assert found["train"]["top1"] > run_eval("runs/small", "--split", "train", "--labels", "wrong")["train"]["top1"]
    assert run_eval("runs/small", "--split", "train", "--batch", "7")["train"]["top1"] == found["train"]["top1"]
    moved = run_eval("runs/small", "--root", str(trained / "elsewhere"), "--split", "test")
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


def test_eval_on_two_ranks_prints_the_result_of_one_rank_once(run_eval: Eval, trained: Path) -> None:
    ended = eval_on_two_ranks(trained, "--split", str(trained / "elsewhere/test"), "--json")
    assert ended.returncode == 0, ended.stderr[-5000:]
    found = json.loads(ended.stdout)
    wanted = run_eval("runs/small", "--split", "elsewhere/test")["test"]
    assert found["test"]["loss"] == pytest.approx(wanted["loss"], rel=1e-6)
    assert {**found["test"], "loss": 0} == {**wanted, "loss": 0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--split", "tset"], "shards/tset"),  # while the ranks open the split
        (["--split", "half"], "samples could not be read in epoch 0"),  # while one rank evaluates
    ],
)
def test_an_error_of_eval_on_two_ranks_is_reported_once(trained: Path, arguments: list[str], message: str) -> None:
    """Only rank 1 finds unreadable samples: it reads the columns from 8 on."""
    write_images(trained / "shards" / "half", 31, broken=tuple(range(8, 16)))
    ended = eval_on_two_ranks(trained, *arguments)
    assert ended.returncode == 1
    assert ended.stdout == ""
    reported = [line for line in ended.stderr.splitlines() if line.startswith("sopdist: ")]
    assert len(reported) == 1, ended.stderr[-5000:]
    assert message in reported[0]
    assert reported[0].startswith("sopdist: rank 1: ") == ("half" in arguments)
    assert "sopdist/cli/commands/eval.py" not in ended.stderr, "a traceback of sopdist; that of torchrun is expected"


def eval_on_two_ranks(trained: Path, *arguments: str) -> CompletedProcess[str]:
    """Run `sopdist eval` on two ranks."""
    relative = ["runs/small", "--root", "shards"]
    absolute = [str(trained / value) if "/" in value or value == "shards" else value for value in relative]
    return launch("torchrun", "sopdist", ["eval", *absolute, *arguments], timeout=120)


def test_without_a_best_network_the_last_one_is_evaluated(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(trained)
    for name in ("config.yaml", "network-last.safetensors"):
        (tmp_path / name).write_bytes((trained / "runs/small" / name).read_bytes())
    assert main(["eval", str(tmp_path)]) == 0
    assert f"{tmp_path}/network-last.safetensors" in capsys.readouterr().out.splitlines()
    assert main(["eval", str(tmp_path), "--which", "best"]) == 1
    assert "has no network-best.safetensors" in capsys.readouterr().err


def test_eval_reads_the_config_of_an_older_run_without_asking_for_changes(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(trained)
    config = (trained / "runs/small/config.yaml").read_text()
    assert "\nmethod:\n" in config
    (tmp_path / "config.yaml").write_text(config.replace("\nmethod:\n", "\nobjective:\n"))
    (tmp_path / "network-last.safetensors").write_bytes((trained / "runs/small/network-last.safetensors").read_bytes())
    assert main(["eval", str(tmp_path)]) == 0
    assert "objective" not in caplog.text


@pytest.mark.parametrize(
    ("split", "location"),
    [
        ("val", "shards/val"),
        ("far/val", "far/val"),
        ("s3://far/val", "s3://far/val"),
        ("pipe:fetch {}", "pipe:fetch {}"),
    ],
)
def test_a_split_is_a_folder_in_the_root_or_a_location(split: str, location: str) -> None:
    assert data_of_split(DataSettings("shards", "digits", split="train"), split).location == location


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["runs"], 1, "runs: neither a run nor a complete checkpoint"),
        (["nowhere"], 1, "nowhere: neither a run nor a complete checkpoint"),
        (["runs/small", "--split", "tset"], 1, "shards/tset"),
        (["runs/small", "--labels", "cleen"], 1, "cleen"),
        (["runs/small", "--root", "moved"], 1, "moved/"),
        (["runs/small", "--which", "newest"], 2, "invalid choice: 'newest'"),
        (["runs/small", "--batch", "0"], 2, "--batch"),
    ],
)
def test_eval_names_what_is_missing_or_invalid(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    arguments: list[str], code: int, message: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(trained)
    try:
        found = main(["eval", *arguments])
    except SystemExit as error:  # raised by argparse
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


def test_splits_are_named_by_the_user_or_after_their_folder() -> None:
    assert named_splits(["test", "imagenet=a/b", "a/c/"]) == {"test": "test", "imagenet": "a/b", "c": "a/c/"}


def test_a_missing_label_set_is_a_data_error(one_rank: World, split: Path) -> None:
    settings = EvaluateSettings({"val": str(split)}, "nobody")
    with pytest.raises(DataError, match="nobody"):
        open_evaluations(settings, DataSettings("unused", "digits", threads=1), CLASSES, 12, one_rank)
