"""Data sets that are sorted by class are shuffled once; `--val` holds out a fraction of each class."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sopdist.cli import main
from sopdist.data.sources.order import arrange, hold_out, is_sorted_by_class, shuffle
from sopdist.data.sources.source import SourceSplit
from sopdist.data.split import open_split
from sopdist.errors import DataError
from tests.support.pictures import encoded, picture


def write_image_folder(root: Path) -> None:
    """20 cats, then 20 dogs."""
    for number in range(40):
        path = root / ("cat" if number < 20 else "dog") / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(picture(number, 20, 20)))


def source(count: int, labels: np.ndarray) -> SourceSplit:
    paths = [f"{number}.jpg" for number in range(count)]
    return SourceSplit(
        "x", "train", ("a", "b"), paths, {"given": labels, "clean": 1 - labels}, lambda n: str(n).encode()
    )


@given(st.integers(0, 200))
def test_a_shuffle_keeps_samples_intact_and_is_always_the_same(count: int) -> None:
    split = source(count, np.arange(count) % 2)
    mixed = shuffle(split)
    assert sorted(mixed.paths) == sorted(split.paths)
    for i, path in enumerate(mixed.paths):
        number = int(path.removesuffix(".jpg"))
        assert mixed.read(i) == str(number).encode()
        assert mixed.labels["given"][i] == number % 2
        assert mixed.labels["clean"][i] == 1 - number % 2
    assert shuffle(split).paths == mixed.paths


def test_data_sets_sorted_by_class_are_recognised() -> None:
    mixed = np.random.default_rng(0).integers(0, 10, 5000)
    assert is_sorted_by_class(np.sort(mixed))
    assert is_sorted_by_class(np.repeat([3, 1, 2, 1, 0], 40))
    assert not is_sorted_by_class(mixed)
    assert not is_sorted_by_class(np.arange(50) % 2)
    assert not is_sorted_by_class(np.zeros(100, dtype=np.int64)), "a single class cannot be shuffled"
    assert not is_sorted_by_class(np.random.default_rng(0).choice(2, 2000, p=[0.95, 0.05])), (
        "a rare class is not a sorted class"
    )


def test_auto_keeps_the_order_of_small_and_mixed_data_sets() -> None:
    by_class, mixed = np.repeat([0, 1], 50), np.arange(100) % 2
    assert arrange(source(100, by_class), "auto", 30)[1] == "shuffled"
    assert arrange(source(100, by_class), "auto", 100)[1] == "source", "a single shard is shuffled by the plan"
    assert arrange(source(100, mixed), "auto", 30)[1] == "source"
    assert arrange(source(100, mixed), "shuffled", 30)[1] == "shuffled"
    assert arrange(source(100, by_class), "source", 30)[0].paths[:2] == ["0.jpg", "1.jpg"]


def test_prepare_shuffles_an_image_folder_and_reports_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_image_folder(tmp_path / "in")
    command = ["prepare", "imagefolder", "--root", str(tmp_path / "in"), "--samples-per-shard", "10"]
    assert main([*command, "--out", str(tmp_path / "out")]) == 0
    assert "shuffled, because it is sorted by class" in capsys.readouterr().out
    with open_split(tmp_path / "out" / "train") as split:
        given_labels = split.labels("given").labels
        assert all(0 < shard.sum() < 10 for shard in given_labels.reshape(4, 10)), "both classes in every shard"
        for index in range(len(split)):
            record = split.record(index)
            assert record["label"] == given_labels[index] == record["path"].startswith("dog")
            assert split.image(index) == (tmp_path / "in" / record["path"]).read_bytes()
    assert json.loads((tmp_path / "out" / "train" / "source.json").read_text())["job"]["order"] == "shuffled"
    assert main([*command, "--out", str(tmp_path / "kept"), "--order", "source"]) == 0
    with open_split(tmp_path / "kept" / "train") as split:
        assert (np.diff(split.labels("given").labels) >= 0).all()


@given(st.lists(st.integers(-1, 3), min_size=12, max_size=200), st.floats(0.1, 0.9))
def test_a_fraction_of_each_class_is_held_out_and_the_rest_is_train(labels: list[int], fraction: float) -> None:
    split = source(len(labels), np.array(labels))
    train, val = hold_out(split, fraction)
    assert (train.name, val.name) == ("train", "val")
    assert sorted(train.paths + val.paths) == sorted(split.paths)
    for label in set(labels):
        total, held = labels.count(label), int((val.labels["given"] == label).sum())
        assert held == pytest.approx(min(fraction * total, total - 1), abs=0.5)
        assert held < total, "every class keeps training images"
    for part in (train, val):
        numbers = [int(path.removesuffix(".jpg")) for path in part.paths]
        assert numbers == sorted(numbers), "in the order of the source"
        assert part.labels["given"].tolist() == [labels[number] for number in numbers]
        assert part.labels["clean"].tolist() == [1 - labels[number] for number in numbers]
        assert [part.read(i) for i in range(len(numbers))] == [str(number).encode() for number in numbers]
    assert hold_out(split, fraction)[1].paths == val.paths


def test_the_held_out_images_are_the_same_in_every_version_and_independent_of_the_order() -> None:
    split = source(1000, np.arange(1000) % 2)
    val = hold_out(split, 0.01)[1]
    assert val.paths == [f"{number}.jpg" for number in (60, 118, 130, 300, 356, 525, 543, 561, 699, 723)]
    positions = [shuffle(split).paths.index(path) for path in hold_out(split, 0.3)[1].paths]
    assert 400 < np.mean(positions) < 600
    with pytest.raises(DataError, match=r"--val 0.0005: no class has enough images"):
        hold_out(split, 0.0005)


def test_val_is_held_out_on_request_if_the_source_has_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_image_folder(tmp_path / "in")
    command = ["prepare", "imagefolder", "--root", str(tmp_path / "in"), "--out", str(tmp_path / "out")]
    assert main([*command, "--val", "0.25"]) == 0
    seen = []
    for name, count in (("train", 30), ("val", 10)):
        with open_split(tmp_path / "out" / name) as split:
            assert np.bincount(split.labels("given").labels).tolist() == [count // 2] * 2
            seen += [split.record(index)["path"] for index in range(len(split))]
            assert all(split.image(i) == (tmp_path / "in" / split.record(i)["path"]).read_bytes() for i in range(5))
        assert json.loads((tmp_path / "out" / name / "source.json").read_text())["job"]["held out"] == 0.25
    assert len(set(seen)) == 40
    capsys.readouterr()
    assert main([*command, "--val", "0.25", "--splits", "val"]) == 0
    assert "already prepared" in capsys.readouterr().out
    assert main([*command, "--val", "0.3"]) == 1
    assert "held out (was 0.25, now 0.3)" in capsys.readouterr().err
    for fraction in ("0", "1", "1.5"):
        with pytest.raises(SystemExit):
            main([*command, "--val", fraction])
        assert "--val" in capsys.readouterr().err
    (tmp_path / "both").mkdir()
    for name in ("train", "val"):
        (tmp_path / "both" / name).symlink_to(tmp_path / "in")
    command[3] = str(tmp_path / "both")
    assert main([*command, "--val", "0.25", "--splits", "train"]) == 1
    assert "--val 0.25: the source already has a split val" in capsys.readouterr().err
