"""The configs in configs/: each loads, lists the commands that prepare and start it, and has the paper's settings."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from sopdist.cli import _parser, main
from sopdist.config import changed
from sopdist.data import Stream
from sopdist.data.augment.recipes import find_recipe
from sopdist.data.settings import DataSettings
from sopdist.data.sources.cifar import CIFAR10, CIFAR100
from sopdist.errors import ConfigError
from sopdist.methods.sop import SOPSettings
from sopdist.models import make_model
from sopdist.train.config import CONFIGS, Config, load

torch.set_num_threads(1)
BASELINES = sorted(f"baselines/{path.stem}" for path in CONFIGS.glob("baselines/*.yaml"))
NAMES = sorted(path.stem for path in CONFIGS.glob("*.yaml")) + BASELINES
CLASSES = {
    "demo": 10, "fashion_mnist": 10, "cifar10": 10, "cifar10_plus": 10, "cifar100": 100, "cifar100_plus": 100,
    "cifar10n": 10, "cifar100n": 100, "clothing1m": 14, "webvision": 50, "webvision_full": 1000,
}  # fmt: skip
CLASSES |= {name: CLASSES[name.removeprefix("baselines/").partition("_")[0]] for name in BASELINES}
SPLITS = {  # that `sopdist prepare SOURCE` writes
    "digits": {"train", "test"},
    "fashion-mnist": {"train", "test"},
    "cifar10": {"train", "test"},
    "cifar100": {"train", "test"},
    "clothing1m": {"train", "clean_train", "val", "test"},
    "webvision": {"train", "val"},
    "ilsvrc12-val": {"ilsvrc12"},
}


class Row(NamedTuple):
    """A column of Table A.1 of the paper, and the number of parameters of its network."""

    model: str
    parameters: int
    batch: int
    lr: float
    decay_at: tuple[float, ...]  # empty: cosine
    weight_decay: float
    epochs: int
    consistency: float
    balance: float


def with_classes(parameters: int, width: int, classes: int) -> int:
    """Convert the number of parameters of a network with 1000 classes to another number of classes."""
    return parameters - (1000 - classes) * (width + 1)


PLUS10 = Row("preact_resnet18", 11_171_274, 128, 0.02, (), 5e-4, 300, 0.9, 0.1)
PLUS100 = Row("preact_resnet18", 11_217_444, 128, 0.02, (), 5e-4, 300, 0.9, 0.1)
PAPER = {
    "cifar10": Row("resnet34", 21_282_122, 128, 0.02, (40, 80), 5e-4, 120, 0, 0),
    "cifar10_plus": PLUS10,
    "cifar10n": PLUS10,
    "cifar100": Row("resnet34", 21_328_292, 128, 0.02, (40, 80), 5e-4, 150, 0, 0),
    "cifar100_plus": PLUS100,
    "cifar100n": PLUS100,
    "clothing1m": Row("resnet50", with_classes(25_557_032, 2048, 14), 64, 0.002, (5,), 1e-3, 10, 0, 0),
    "webvision": Row("inception_resnet_v2", with_classes(55_843_464, 1536, 50), 32, 0.02, (50,), 5e-4, 100, 0, 0),
}


def test_this_file_covers_every_config() -> None:
    assert set(NAMES) == set(CLASSES)


@pytest.mark.parametrize("name", PAPER)
def test_hyper_parameters_match_the_paper(name: str) -> None:
    config, row = load(name), PAPER[name]
    assert config.model.name.partition(".")[0] == row.model
    assert (config.train.batch, config.train.epochs, config.train.accumulate) == (row.batch, row.epochs, 1)
    assert (config.optim.name, config.optim.momentum, config.optim.nesterov) == ("sgd", 0.9, False)
    assert (config.optim.lr, config.optim.weight_decay) == (row.lr, row.weight_decay)
    assert (config.optim.milestones, config.optim.gamma) == (row.decay_at, 0.1)
    assert config.optim.schedule == ("multistep" if row.decay_at else "cosine")
    assert isinstance(config.method, SOPSettings)
    assert (config.method.consistency, config.method.balance) == (row.consistency, row.balance)
    assert (config.method.name, config.method.variant) == ("sop", "flow")
    assert (
        config.optim.warmup_epochs == config.optim.final_lr == config.train.clip == config.data.balanced_per_epoch == 0
    )


def test_the_table_can_act_within_the_epochs_of_every_config() -> None:
    for name in set(NAMES) - set(BASELINES):
        config = load(name)
        assert isinstance(config.method, SOPSettings)
        assert config.method.visits is None, "the default, 4"
        assert config.train.epochs > 4


def test_the_setting_of_the_benchmark_is_that_of_fashion_mnist() -> None:
    from sopdist.bench import fashion_mnist as benchmark

    config = load("fashion_mnist")
    assert (config.train.batch, config.optim.lr) == (benchmark.BATCH, benchmark.LEARNING_RATE)
    assert (config.optim.momentum, config.optim.weight_decay) == (benchmark.MOMENTUM, benchmark.WEIGHT_DECAY)
    assert (config.optim.schedule, config.train.epochs, config.model.name) == ("cosine", 30, "mlp")
    assert 60_000 * (1 - prepared(commands("fashion_mnist"))[0].val) == 15_000


@pytest.mark.parametrize("name", NAMES)
def test_its_network_exists_and_accepts_its_images(name: str) -> None:
    config = changed(load(name), "model.pretrained", False)  # without downloads
    recipe = find_recipe(config.data.recipe)
    channels = 1 if recipe.grey else 3
    network = make_model(config.model, channels=channels, size=recipe.size, classes=CLASSES[name]).eval()
    with torch.no_grad():
        assert network(torch.zeros(1, channels, recipe.size, recipe.size)).shape == (1, CLASSES[name])
    if name in PAPER:
        assert sum(parameter.numel() for parameter in network.parameters()) == PAPER[name].parameters


def test_only_the_network_that_is_pretrained_in_the_paper_is_pretrained() -> None:
    assert {name for name in NAMES if load(name).model.pretrained} == {name for name in NAMES if "clothing1m" in name}


# -- the commands at the top of each ---------------------------------------------------------------------------------


def commands(name: str) -> list[list[str]]:
    """The indented lines of the comment at the top; `\\` continues a line."""
    head = (CONFIGS / f"{name}.yaml").read_text().partition("\ndata:")[0]
    lines = re.findall(r"^#   ( *\S.*)$", head, re.MULTILINE)
    return [shlex.split(line) for line in "\n".join(lines).replace("\\\n", " ").splitlines()]


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    return _parser().parse_args(arguments)


def prepared(lines: list[list[str]]) -> list[argparse.Namespace]:
    return [parsed(line[1:]) for line in lines if line[:2] == ["sopdist", "prepare"]]


def folders_and_label_sets(name: str) -> dict[str, set[str]]:
    """The result of the commands: the folder of each split, and its label sets."""
    splits: dict[str, set[str]] = {}
    for args in prepared(commands(name)):
        for split in SPLITS[args.source] | ({"val"} if args.val else set()):
            splits[f"{args.out}/{split}"] = {"given"}
        if getattr(args, "human", None):
            splits[f"{args.out}/train"] |= set((CIFAR10 if args.source == "cifar10" else CIFAR100).human.values())
    for line in commands(name):
        if line[:3] == ["sopdist", "labels", "noise"]:
            args = parsed(line[1:])
            splits[str(args.folder)].add(
                f"{ {'symmetric': 'sym', 'pair': 'pair'}[args.kind] }-{args.rate}-seed{args.seed}"
            )
    return splits


@pytest.mark.parametrize("name", NAMES)
def test_its_commands_write_the_splits_and_label_sets_that_it_uses(name: str) -> None:
    starts = [line for line in commands(name) if line[0] != "sopdist"]
    assert starts
    splits = folders_and_label_sets(name)
    for line in starts:
        script = line.index("launch/train.py")
        assert line[script + 1 : script + 3] == ["--cfg", name]
        config: Config = load(name, line[script + 3 :])
        assert config.data.labels in splits[config.data.location]
        for split, folder in config.evaluate.splits.items():
            assert config.evaluate.labels_of(split) in splits[f"{config.data.root}/{folder}"]
        assert config.evaluate.best != "test", "the test split must not select a checkpoint"
        if "sym-" in config.data.labels and config.evaluate.best:
            assert config.evaluate.labels_of(config.evaluate.best) == config.data.labels, "noisy labels select it"
    assert line[0] in ("deepspeed", "torchrun")


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "cifar10_plus", "cifar100_plus", "cifar10n", "cifar100n"])
def test_cifar_has_the_number_of_training_images_of_the_paper(name: str) -> None:
    (args,) = prepared(commands(name))
    training_examples = {"cifar10": 45_000, "cifar100": 45_000}.get(name, 50_000)
    assert 50_000 * (1 - (args.val or 0)) == training_examples


def test_mini_webvision_is_evaluated_on_its_classes_of_imagenet_and_the_full_one_on_all() -> None:
    for name, subset in (("webvision", "mini"), ("webvision_full", "full")):
        webvision, imagenet = prepared(commands(name))
        assert (webvision.subset, imagenet.classes_count) == (subset, CLASSES[name])
        assert set(load(name).evaluate.splits) == {"webvision", "ilsvrc12"}


def test_the_commands_of_the_demo_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for line in commands("demo"):
        if line[0] == "sopdist":
            assert main(line[1:]) == 0, capsys.readouterr().err
    config = load("demo")
    with Stream(config.data, config.train.batch) as stream:
        batch = next(iter(stream.epoch(0)))
        assert batch.images.shape == (64, 1, 8, 8)
        wrong = stream.labels.labels != stream.split.labels(config.log.clean).labels
        assert 0.33 < wrong.mean() < 0.39, "of the 40% that are resampled, a tenth is right by chance"
    test = DataSettings(config.data.root, config.data.recipe, config.evaluate.splits["test"], config.evaluate.labels)
    with Stream(test, 64, train=False) as stream:
        assert sum(float(batch.weight.sum()) for batch in stream.epoch(0)) == len(stream.split) > 300


def test_balance_needs_the_full_batch_at_once() -> None:
    with pytest.raises(ConfigError, match=r"method\.balance = 0.1: .* train\.accumulate"):
        load("cifar10_plus", ["train.accumulate=2"])
    assert load("cifar10", ["train.accumulate=2"]).train.accumulate == 2
