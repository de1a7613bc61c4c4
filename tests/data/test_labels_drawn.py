"""`sopdist labels noise`, `list` and `diff`: synthetic noise and comparisons of label sets."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from sopdist.cli import main
from sopdist.cli.commands.labels_text import diff_text
from sopdist.data.labelling.diff import compare_labels
from sopdist.data.labels import list_labels, write_labels
from sopdist.data.manifest import read_manifest
from tests.support.label_sets import GIVEN, labels, noise, recipe
from tests.support.small_splits import sample, write_split


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_split(tmp_path / "train")
    return tmp_path / "train"


# Noise


def test_noise_is_stored_with_its_recipe(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert noise(folder, "symmetric", "--rate", "0.4", "--seed", "7") == 0
    drawn = np.array(labels(folder, "sym-0.4-seed7"))
    changed = int((drawn != GIVEN).sum())
    found = recipe(folder, "sym-0.4-seed7")
    assert found["kind"] == "symmetric"
    assert (found["rate"], found["seed"], found["from"]) == (0.4, 7, "given")
    assert (found["changed"], found["measured_rate"]) == (changed, changed / 12)
    assert f"{changed} of 12 known labels differ from given" in capsys.readouterr().out
    assert noise(folder, "symmetric", "--rate", "0.4", "--seed", "7") == 0  # the same again
    assert "already exists" in capsys.readouterr().out


def test_noise_starts_from_clean_labels_if_they_exist(folder: Path) -> None:
    write_labels(folder, read_manifest(folder), "clean", np.zeros(12, dtype=int), {})
    assert noise(folder, "exclusive", "--rate", "0") == 0
    assert labels(folder, "excl-0-seed0") == [0] * 12
    assert noise(folder, "exclusive", "--rate", "1", "--from", "given", "--name", "mine") == 0
    assert (np.array(labels(folder, "mine")) != GIVEN).all()


def test_pairs_are_given_by_index_name_or_preset(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert noise(folder, "pair", "--rate", "1", "--pairs", "cat:owl, 1:0") == 0
    assert labels(folder, "pair-1-seed0") == [2, 0, 2] * 4
    assert "0 cat -> 2 owl, 1 dog -> 0 cat" in capsys.readouterr().out
    assert recipe(folder, "pair-1-seed0")["pairs"] == [[0, 2], [1, 0]]
    assert noise(folder, "asymmetric", "--rate", "1", "--preset", "next", "--name", "next") == 0
    assert labels(folder, "next") == [1, 2, 0] * 4


@pytest.mark.parametrize("name", ["swap.csv", "swap.txt", "swap.npy"])
def test_a_matrix_is_read_from_a_file(folder: Path, name: str) -> None:
    path, matrix = folder.parent / name, np.eye(3)[[1, 0, 2]]
    if name == "swap.npy":
        np.save(path, matrix)
    else:
        np.savetxt(path, matrix, delimiter="," if name == "swap.csv" else " ")
    assert noise(folder, "matrix", "--matrix", str(path), "--seed", "3") == 0
    assert labels(folder, "matrix-swap-seed3") == [1, 0, 2] * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["pair", "--rate", "1", "--pairs", "cat"], "--pairs 'cat': expected FROM:TO"),
        (["pair", "--rate", "1", "--pairs", "cat:3"], "class 3: must be from 0 to 2"),
        (["pair", "--rate", "1", "--pairs=-1:2"], "'-1' is not a class"),
        (["pair", "--rate", "1", "--pairs", "0:1,cat:2"], "class cat already has a pair"),
        (["pair", "--rate", "1", "--pairs", "0:0"], "the class is paired with itself"),
        (["pair", "--rate", "1", "--preset", "cifar10"], "needs 10 classes, the split has 3"),
        (["symmetric", "--rate", "1", "--from", "best"], "no label set 'best'; available: given"),
        (["matrix", "--matrix", "absent.npy"], "absent.npy: cannot be read"),
        (["matrix", "--matrix", "absent.json"], "a matrix must be a .npy"),
    ],
)
def test_invalid_noise_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert noise(folder, *options) == 1
    assert message in capsys.readouterr().err
    assert list_labels(folder) == ["given"]


def test_a_matrix_whose_file_name_is_not_a_valid_name_needs_one(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(folder.parent / "my matrix.npy", np.eye(3))
    options = ["matrix", "--matrix", str(folder.parent / "my matrix.npy")]
    assert noise(folder, *options) == 1
    assert "choose another with --name" in capsys.readouterr().err
    assert noise(folder, *options, "--name", "mine") == 0


def test_preset_next_needs_two_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_split(tmp_path, [sample(0, record={"label": 0})], classes=("cat",))
    assert noise(tmp_path, "pair", "--rate", "1", "--preset", "next") == 1
    assert "needs at least two classes" in capsys.readouterr().err


def test_a_bad_line_of_a_matrix_is_reported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder.parent / "m.txt"
    for content, message in (
        ("1 0 0\n0 1\n0 0 1\n", "m.txt, line 2: 2 numbers"),
        ("1 0 0\n0 one 0\n0 0 1\n", "m.txt, line 2: could not convert"),
        ("1 0 0\n0 1 0\n", "shape (2, 3), expected 3 x 3"),
        ("1 0 0\n0 1 0\n0 0.5 0.6\n", "row 2 (from 0) sums to 1.1"),
    ):
        path.write_text(content)
        assert noise(folder, "matrix", "--matrix", str(path)) == 1
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["symmetric"], "symmetric noise needs --rate"),
        (["symmetric", "--rate", "1.1"], "'1.1' is not a number from 0 to 1"),
        (["symmetric", "--rate", "nan"], "'nan' is not a number from 0 to 1"),
        (["symmetric", "--rate", "1", "--seed", "-3"], "'-3' is not an integer"),
        (["symmetric", "--rate", "1", "--preset", "next"], "--preset cannot be used with symmetric noise"),
        (["matrix", "--rate", "1", "--matrix", "m.npy"], "--rate cannot be used with matrix noise"),
        (["matrix"], "matrix noise needs --matrix"),
        (["asymmetric", "--rate", "1"], "asymmetric noise needs --pairs or --preset"),
        (["pair", "--rate", "1", "--pairs", "0:1", "--preset", "next"], "pair noise needs --pairs or --preset"),
        (["salt"], "invalid choice"),
        (["symetric"], "did you mean 'symmetric'?"),
        (["symmetric", "--rat", "1"], "unrecognized arguments: --rat"),
    ],
)
def test_wrong_combinations_of_options_are_reported(
    folder: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        noise(folder, *options)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


# Lists and comparisons


def test_the_list_shows_the_fraction_of_wrong_labels(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = read_manifest(folder)
    assert main(["labels", "list", str(folder)]) == 0
    assert "wrong: not known" in capsys.readouterr().out
    clean = np.array([0, 1, 2, 0, 0, 0, -1, -1, -1, -1, -1, -1])
    write_labels(folder, manifest, "clean", clean, {"kind": "annotators", "note": "x" * 100})
    noise(folder, "pair", "--rate", "1", "--pairs", "0:1")
    write_labels(folder, manifest, "broken", clean, {})
    (folder / "labels" / "broken.npy").write_bytes(b"")
    capsys.readouterr()
    assert main(["labels", "list", str(folder)]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert lines["given"].split()[1:4] == ["12", "0", "33.33%"]
    assert lines["clean"].split()[1:4] == ["12", "6", "0.00%"]
    assert lines["clean"].endswith("...")
    assert lines["pair-1-seed0"].split()[1:4] == ["12", "6", "66.67%"]
    assert "pair noise, 1.0, of clean, seed 0" in lines["pair-1-seed0"]
    assert "DAMAGED" in lines["broken"]


def test_few_classes_are_compared_as_a_matrix(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = np.array([0, 1, 2, 0, 1, 2, 2, 1, -1, 2, 2, -1])
    write_labels(folder, read_manifest(folder), "other", other, {})
    path = folder.parent / "d.csv"
    assert main(["labels", "diff", str(folder), "given", "other", "--csv", str(path)]) == 0
    out = capsys.readouterr().out
    assert "given -> other: 3 of 10 labels differ (30.00%)" in out
    assert "2 samples are left out" in out
    rows = [line.split() for line in out.splitlines()[-3:]]
    assert rows == [
        ["0", "cat", "2", ".", "2", "4", "2", "50.0%"],
        ["1", "dog", ".", "3", "1", "4", "1", "25.0%"],
        ["2", "owl", ".", ".", "2", "2", "0", "0.0%"],
    ]
    with path.open(newline="") as file:
        transitions = [tuple(row.values()) for row in csv.DictReader(file)]
    assert ("0", "cat", "2", "owl", "2") in transitions
    assert len(transitions) == 5
    assert sum(int(row[-1]) for row in transitions) == 10


def test_many_classes_are_compared_by_their_most_frequent_transitions() -> None:
    draw = np.random.default_rng(0)
    before = draw.integers(0, 100, 5000).astype(np.int32)
    after = np.where(before == 7, 8, before).astype(np.int32)
    after[:40] = (before[:40] + 1) % 100
    text = diff_text(compare_labels(before, after, 100), ("a", "b"), [f"class-{k}" for k in range(100)])
    (most_frequent,) = [line for line in text.splitlines() if "8 class-8" in line and "7 class-7" in line]
    assert most_frequent.split()[-1] == str(int(((before == 7) & (after == 8)).sum()))
    assert "most frequent transitions (20 of" in text
    assert len(text.splitlines()) < 50


def test_equal_label_sets_and_sets_without_common_labels_can_be_compared() -> None:
    same = np.arange(30, dtype=np.int32)
    names = [str(k) for k in range(30)]
    assert "no labels differ" in diff_text(compare_labels(same, same, 30), ("a", "b"), names)
    nothing = np.full(30, -1, dtype=np.int32)
    assert "0 of 0 labels differ" in diff_text(compare_labels(same, nothing, 30), ("a", "b"), names)


def test_a_file_that_cannot_be_written_is_reported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["labels", "diff", str(folder), "given", "given", "--csv", str(folder / "no" / "d.csv")]) == 1
    assert "d.csv: cannot be written" in capsys.readouterr().err


def test_help_explains_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, says in (
        (["labels", "--help"], "sym-0.4-seed0"),
        (["labels", "add", "--help"], "header line"),
        (["labels", "noise", "--help"], "truck -> automobile"),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert says in capsys.readouterr().out
