"""Label sets of a comparison: existing ones are used, others are created once, with the labels that users would get."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sopdist.cli import main
from sopdist.compare.label_sets import (
    TrainingLabels,
    create_label_set,
    facts_of,
    find_label_sets,
    noise_of_recipe,
)
from sopdist.data.labels import list_labels
from sopdist.data.settings import DataSettings
from sopdist.errors import ConfigError, DataError
from tests.compare.conftest import SAMPLES, compare
from tests.support.label_sets import labels, recipe

TRAIN = DataSettings("shards", "digits", split="train")
VAL = DataSettings("shards", "digits", split="val")

pytestmark = pytest.mark.usefixtures("workspace")


def test_noise_is_created_as_by_the_labels_command_and_only_once(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--methods", "ce", "--seeds", "2", "--noise", "sym-0.4,wrong,exclusive-0.5-seed3", "--list")
    assert compare(*arguments) == 0
    assert capsys.readouterr().out == "6\n"
    train, val = workspace / "shards" / "train", workspace / "shards" / "val"
    assert list_labels(train) == ["clean", "excl-0.5-seed3", "given", "sym-0.4-seed0", "wrong"]
    assert list_labels(val) == list_labels(train), "the validation split has the same noise"
    files = {path: path.stat().st_mtime_ns for split in (train, val) for path in (split / "labels").iterdir()}
    assert compare(*arguments) == 0
    assert {path: path.stat().st_mtime_ns for split in (train, val) for path in (split / "labels").iterdir()} == files
    for name, split in (("sym-0.4-seed0", train), ("sym-0.4-seed0", val)):
        assert main(["labels", "noise", str(split), "symmetric", "--rate", "0.4", "--name", "expected"]) == 0
        assert labels(split, name) == labels(split, "expected")
        assert main(["labels", "remove", str(split), "expected"]) == 0
    assert recipe(train, "excl-0.5-seed3")["seed"] == 3


def test_facts_say_how_many_labels_are_wrong() -> None:
    found = facts_of(TRAIN, "wrong")
    clean, wrong = (np.array(labels(Path("shards/train"), name)) for name in ("clean", "wrong"))
    assert found.wrong == (clean != wrong).sum() / SAMPLES
    assert facts_of(TRAIN, "clean").wrong == 0


def test_an_existing_label_set_is_found_by_its_kind_and_rate() -> None:
    assert main(["labels", "noise", "shards/train", "symmetric", "--rate", "0.4"]) == 0
    assert find_label_sets(["sym-0.4"], TRAIN, "--noise") == (TrainingLabels("sym-0.4-seed0"),)
    (missing,) = find_label_sets(["sym-0.4-seed1"], TRAIN, "--noise")
    assert missing.name == "sym-0.4-seed1"
    assert missing.noise


def test_noise_that_needs_more_than_a_rate_is_refused_with_advice() -> None:
    (found,) = find_label_sets(["pair-0.4"], TRAIN, "--noise")
    with pytest.raises(ConfigError, match=r"pair noise needs --pairs or --preset; create the label set with `sopdist"):
        create_label_set(TRAIN, found.noise, "--noise pair-0.4")
    with pytest.raises(DataError, match=r"KIND is one of sym, excl, pair"):
        find_label_sets(["nonsense-0.4"], TRAIN, "--noise")


def test_pairs_of_the_training_labels_are_used_for_validation_too() -> None:
    assert main(["labels", "noise", "shards/train", "pair", "--rate", "0.4", "--pairs", "a:b,c:d"]) == 0
    noise = noise_of_recipe(facts_of(TRAIN, "pair-0.4-seed0").recipe, "pair-0.4-seed0", ["clean", "given"])
    create_label_set(VAL, noise, "")
    assert recipe(Path("shards/val"), "pair-0.4-seed0")["pairs"] == [[0, 1], [2, 3]]
    assert noise_of_recipe({"kind": "test"}, "human", []) == (), "labels that nobody can generate"
