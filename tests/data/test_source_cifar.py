"""CIFAR-10 and CIFAR-100: the Python and the binary version, and the human labels of CIFAR-N."""

from __future__ import annotations

import io
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from sopdist.cli import main
from sopdist.data.headers import read_header
from sopdist.data.labels import list_labels, write_labels
from sopdist.data.manifest import read_manifest
from sopdist.data.sources.cifar import CIFAR10, CIFAR100, Cifar
from sopdist.data.split import open_split

from .test_source_unpickle import Malicious, python2_pickle, torch_file
from .test_sources import error_of, find, write_tree

RANDOM = np.random.default_rng(0)
NAMES10 = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
NAMES100 = [f"fine_{label}" for label in range(100)]
BATCHES = 5
EACH = 4  # images per batch, 20 in train
PIXELS = RANDOM.integers(0, 256, (30, 3072), dtype=np.uint8)  # 20 for train, 10 for test
LABELS10 = RANDOM.integers(0, 10, 30).tolist()
LABELS100 = RANDOM.integers(0, 100, 30).tolist()
COARSE = RANDOM.integers(0, 20, 30).tolist()


def parts() -> dict[str, slice]:
    train = {f"data_batch_{n + 1}": slice(n * EACH, (n + 1) * EACH) for n in range(BATCHES)}
    return {**train, "test_batch": slice(20, 30)}


def as_python3(fields: dict[str, Any]) -> bytes:
    return pickle.dumps(fields, protocol=2)


def as_python3_with_bytes(fields: dict[str, Any]) -> bytes:
    return pickle.dumps({key.encode(): value for key, value in fields.items()}, protocol=2)


WRITERS = {"python 2": python2_pickle, "str keys": as_python3, "bytes keys": as_python3_with_bytes}


def cifar10_pickles(write: Any = python2_pickle) -> dict[str, bytes | str]:
    files = {
        name: write({
            "batch_label": "a batch",
            "labels": LABELS10[part],
            "data": PIXELS[part],
            "filenames": [f"x_{number}.png" for number in range(30)[part]],
        })
        for name, part in parts().items()
    }  # fmt: skip
    return {**files, "batches.meta": write({"num_cases_per_batch": EACH, "label_names": NAMES10, "num_vis": 3072})}


def cifar100_pickles(write: Any = python2_pickle) -> dict[str, bytes | str]:
    files = {
        name: write({"fine_labels": LABELS100[part], "coarse_labels": COARSE[part], "data": PIXELS[part]})
        for name, part in (("train", slice(0, 20)), ("test", slice(20, 30)))
    }
    coarse = [f"coarse_{label}" for label in range(20)]
    return {**files, "meta": write({"fine_label_names": NAMES100, "coarse_label_names": coarse})}


def records(part: slice, *labels: list[int]) -> bytes:
    columns = [np.array(each[part], dtype=np.uint8)[:, None] for each in labels]
    return np.concatenate([*columns, PIXELS[part]], axis=1).tobytes()


def cifar10_binaries() -> dict[str, bytes | str]:
    files: dict[str, bytes | str] = {f"{name}.bin": records(part, LABELS10) for name, part in parts().items()}
    return {**files, "batches.meta.txt": "\n".join(NAMES10) + "\n\n"}


def cifar100_binaries() -> dict[str, bytes | str]:
    return {
        "train.bin": records(slice(0, 20), COARSE, LABELS100),
        "test.bin": records(slice(20, 30), COARSE, LABELS100),
        "fine_label_names.txt": "\n".join(NAMES100) + "\n",
        "coarse_label_names.txt": "x\n",
    }


def under(folder: str, files: dict[str, bytes | str]) -> dict[str, bytes | str]:
    return {f"{folder}/{name}": content for name, content in files.items()}


def check(source: Cifar, root: Path, labels: list[int], names: list[str]) -> None:
    splits = find(source, root)
    assert list(splits) == ["train", "test"]
    for split, part in ((splits["train"], slice(0, 20)), (splits["test"], slice(20, 30))):
        assert split.classes == tuple(names)
        assert split.labels.keys() == {"given", "clean"}
        assert split.labels["given"].tolist() == split.labels["clean"].tolist() == labels[part]
        for number, planes in enumerate(PIXELS[part]):
            assert split.paths[number] == f"{split.name}/{number:05d}.png"
            content = split.read(number)
            assert content == split.read(number)
            assert read_header(content) == ("png", 32, 32, 1, True)
            image = np.asarray(Image.open(io.BytesIO(content)))  # (row, column, channel)
            for channel in range(3):
                plane = planes[channel * 1024 : (channel + 1) * 1024].reshape(32, 32)
                assert np.array_equal(image[:, :, channel], plane)


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("inside", [False, True])
def test_the_python_version_is_read(writer: str, inside: bool, tmp_path: Path) -> None:
    write_tree(tmp_path, under("cifar-10-batches-py", cifar10_pickles(WRITERS[writer])))
    write_tree(tmp_path, under("cifar-100-python", cifar100_pickles(WRITERS[writer])))
    check(CIFAR10, tmp_path / "cifar-10-batches-py" if inside else tmp_path, LABELS10, NAMES10)
    check(CIFAR100, tmp_path / "cifar-100-python" if inside else tmp_path, LABELS100, NAMES100)


@pytest.mark.parametrize("inside", [False, True])
def test_the_binary_version_gives_the_same_images_and_labels(inside: bool, tmp_path: Path) -> None:
    write_tree(tmp_path, under("cifar-10-batches-bin", cifar10_binaries()))
    write_tree(tmp_path, under("cifar-100-binary", cifar100_binaries()))
    check(CIFAR10, tmp_path / "cifar-10-batches-bin" if inside else tmp_path, LABELS10, NAMES10)
    check(CIFAR100, tmp_path / "cifar-100-binary" if inside else tmp_path, LABELS100, NAMES100)


def test_labels_may_be_an_array(tmp_path: Path) -> None:
    files = cifar100_pickles()
    files["train"] = as_python3({"fine_labels": np.array(LABELS100[:20]), "data": PIXELS[:20]})
    check(CIFAR100, write_tree(tmp_path, files), LABELS100, NAMES100)


def test_the_error_for_an_empty_root_lists_the_expected_files(tmp_path: Path) -> None:
    message = error_of(CIFAR10, tmp_path)
    assert f"looked for data_batch_1 in {tmp_path / 'cifar-10-batches-py'}" in message
    assert f"data_batch_1.bin in {tmp_path / 'cifar-10-batches-bin'}" in message


@pytest.mark.parametrize("name", ["data_batch_3", "test_batch", "batches.meta"])
def test_a_missing_file_is_reported(name: str, tmp_path: Path) -> None:
    root = write_tree(tmp_path, under("cifar-10-batches-py", cifar10_pickles()))
    (root / "cifar-10-batches-py" / name).unlink()
    assert f"missing: {name}; looked in {root / 'cifar-10-batches-py'}, {root}" in error_of(CIFAR10, root)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train", python2_pickle({"data": PIXELS[:2], "labels": [1, 2]}), "train: no key 'fine_labels', only data, l"),
        ("train", python2_pickle({"fine_labels": [1]}), "train: no key 'data'"),
        ("train", python2_pickle({"data": PIXELS[:2], "fine_labels": [1]}), "train: 2 images and 1 labels"),
        (
            "train",
            python2_pickle({"data": PIXELS[:2], "fine_labels": [1, 100]}),
            "label 100 at position 1; must be from 0 to 99",
        ),
        ("train", python2_pickle({"data": PIXELS[:2], "fine_labels": [1, "x"]}), "label b'x' at position 1"),
        ("train", python2_pickle({"data": PIXELS[:2], "fine_labels": 3}), "int, expected a list of labels"),
        ("train", python2_pickle({"data": PIXELS[0], "fine_labels": [1]}), "data is not an array of N x 3072 bytes"),
        ("train", python2_pickle({"data": [1, 2], "fine_labels": [1]}), "data is not an array"),
        ("train", b"<html>", "train: not a readable pickle"),
        ("meta", python2_pickle({"fine_label_names": ["a"]}), "meta: fine_label_names is not a list of 100 names"),
    ],
)
def test_an_invalid_pickle_is_reported(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    assert message in error_of(CIFAR100, write_tree(tmp_path, {**cifar100_pickles(), name: content}))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train.bin", b"x" * 3073, "train.bin: 3073 bytes, not a multiple of 3074"),
        ("train.bin", b"", "train.bin: 0 bytes"),
        ("test.bin", bytes([0, 100]) + bytes(3072), "test.bin: label 100 at position 0"),
        ("fine_label_names.txt", b"a\nb\n", "fine_label_names.txt: 2 class names, expected 100"),
    ],
)
def test_an_invalid_binary_file_is_reported(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    assert message in error_of(CIFAR100, write_tree(tmp_path, {**cifar100_binaries(), name: content}))


def test_a_malicious_batch_is_refused_and_not_executed(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    malicious = pickle.dumps({"data": Malicious(os.system, f"touch {marker}")}, protocol=2)
    root = write_tree(tmp_path, {**cifar10_pickles(), "data_batch_2": malicious})
    assert f"{root / 'data_batch_2'}: the pickle refers to posix.system" in error_of(CIFAR10, root)
    assert not marker.exists()


def human10() -> dict[str, NDArray[np.int64]]:
    clean = np.array(LABELS10[:20])
    keys = ["aggre_label", "worse_label", "random_label1", "random_label2", "random_label3"]
    wrong = {key: np.where(np.arange(20) < 2 + n, (clean + 1) % 10, clean) for n, key in enumerate(keys)}
    return {"clean_label": clean, **wrong}


@pytest.mark.parametrize("version", ["pickles", "binaries"])
def test_human_labels_become_label_sets_of_train_with_their_noise_rate(version: str, tmp_path: Path) -> None:
    files = cifar10_pickles() if version == "pickles" else cifar10_binaries()
    human = human10()
    root = write_tree(tmp_path, {**files, "CIFAR-10_human.pt": torch_file(human)})
    splits = find(CIFAR10, root, "--human", str(root / "CIFAR-10_human.pt"))
    sets = {
        "cifar10n-aggre": "aggre_label", "cifar10n-worst": "worse_label", "cifar10n-random1": "random_label1",
        "cifar10n-random2": "random_label2", "cifar10n-random3": "random_label3",
    }  # fmt: skip
    train = splits["train"]
    assert train.labels.keys() == {"given", "clean", *sets}
    for wrong, (name, key) in enumerate(sets.items(), start=2):
        assert train.labels[name].tolist() == human[key].tolist()
        about = {"source": "cifar-n", "file": "CIFAR-10_human.pt", "key": key, "noise_rate": wrong / 20}
        assert train.origins[name] == about
    assert train.labels["given"].tolist() == LABELS10[:20]
    assert splits["test"].labels.keys() == {"given", "clean"}


def test_files_of_a_split_that_is_not_selected_may_be_missing(tmp_path: Path) -> None:
    root = write_tree(tmp_path, cifar10_binaries())
    (root / "test_batch.bin").unlink()
    assert list(find(CIFAR10, root, "--splits", "train")) == ["train"]


def prepare(root: Path, *options: str) -> int:
    return main(["prepare", "cifar10", "--root", str(root), "--out", str(root / "out"), *options])


def test_label_sets_can_be_added_to_a_complete_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    human = human10()
    root = write_tree(tmp_path, {**cifar10_pickles(), "h.pt": torch_file(human)})
    train = root / "out" / "train"
    assert prepare(root, "--samples-per-shard", "7") == 0
    write_labels(train, read_manifest(train), "mine", np.zeros(20, np.int64), {"by": "me"})
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in train.rglob("*") if path.is_file()}

    capsys.readouterr()
    assert prepare(root, "--samples-per-shard", "7", "--human", str(root / "h.pt")) == 0
    assert f"{train}: already prepared; label sets added: cifar10n-aggre, cifar10n-rand" in capsys.readouterr().out
    after = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in before}
    assert {path.name for path in before if after[path] != before[path]} == {"source.json"}
    with open_split(train) as split:
        added = split.labels("cifar10n-worst")
        assert added.labels.tolist() == human["worse_label"].tolist()
        assert added.recipe["key"] == "worse_label"

    assert prepare(root, "--samples-per-shard", "7", "--human", str(root / "h.pt")) == 0
    assert prepare(root, "--samples-per-shard", "7") == 0, "a complete split may have more label sets"
    assert "label sets added" not in capsys.readouterr().out
    assert prepare(root, "--samples-per-shard", "7", "--human", str(root / "h.pt")) == 0
    shutil.copytree(root / "out", root / "one")
    (root / "one" / "train" / "labels" / "mine.npy").unlink()
    (root / "one" / "train" / "labels" / "mine.json").unlink()
    at_once = ["prepare", "cifar10", "--root", str(root), "--out", str(root / "two"), "--samples-per-shard", "7"]
    assert main([*at_once, "--human", str(root / "h.pt")]) == 0
    for path in (root / "two").rglob("*"):
        if path.is_file():
            assert path.read_bytes() == (root / "one" / path.relative_to(root / "two")).read_bytes(), path
    assert len(list((root / "one").rglob("*"))) == len(list((root / "two").rglob("*")))

    write_tree(root, {"h.pt": torch_file({**human, "worse_label": human["clean_label"]})})
    assert prepare(root, "--samples-per-shard", "7", "--human", str(root / "h.pt")) == 1
    assert "was prepared differently: labels" in capsys.readouterr().err, "label sets of the same name must be equal"


def test_existing_label_sets_are_never_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = write_tree(tmp_path, {**cifar10_pickles(), "h.pt": torch_file(human10())})
    train = root / "out" / "train"
    assert prepare(root) == 0
    source = (train / "source.json").read_bytes()
    write_labels(train, read_manifest(train), "cifar10n-worst", np.zeros(20, np.int64), {"by": "me"})
    assert prepare(root, "--human", str(root / "h.pt")) == 1
    error = capsys.readouterr().err
    assert "already has a label set 'cifar10n-worst' with other labels; rename or remove" in error
    assert list_labels(train) == ["cifar10n-worst", "clean", "given"], "no label set was added"
    assert (train / "source.json").read_bytes() == source
    for suffix in ("npy", "json"):
        (train / "labels" / f"cifar10n-worst.{suffix}").unlink()
    for array in (np.zeros(20, np.int32), human10()["worse_label"][:19]):  # created manually, without a description
        np.save(train / "labels" / "cifar10n-worst.npy", array)
        assert prepare(root, "--human", str(root / "h.pt")) == 1
    np.save(train / "labels" / "cifar10n-worst.npy", human10()["worse_label"])  # as an interrupt leaves it
    write_labels(train, read_manifest(train), "cifar10n-aggre", human10()["aggre_label"], {"by": "me"})
    assert prepare(root, "--human", str(root / "h.pt")) == 0
    assert len(list_labels(train)) == 7
    with open_split(train) as split:
        assert split.labels("cifar10n-worst").recipe["source"] == "cifar-n"
        assert split.labels("cifar10n-aggre").recipe == {"by": "me"}, "a label set with the same labels is kept"


def test_coarse_labels_of_cifar100n_are_skipped_with_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clean = np.array(LABELS100[:20])
    coarse = {"noisy_coarse_label": np.zeros(20, int), "clean_coarse_label": np.array(COARSE[:20])}
    noisy = (clean + 1) % 100
    file = torch_file({"clean_label": clean, "noisy_label": noisy[:, None], **coarse})  # a column vector is accepted
    root = write_tree(tmp_path, {**cifar100_pickles(), "h.pt": file})
    train = find(CIFAR100, root, "--human", str(root / "h.pt"))["train"]
    assert train.labels.keys() == {"given", "clean", "cifar100n-noisy"}
    assert train.labels["cifar100n-noisy"].tolist() == noisy.tolist()
    assert train.origins["cifar100n-noisy"]["noise_rate"] == 1.0
    assert "skipped: noisy_coarse_label, clean_coarse_label" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clean_label": np.roll(LABELS10[:20], 1)}, "belongs to another data set, or to another order of its images"),
        ({"clean_label": np.array(LABELS10[:19])}, "19 labels for 20 images"),
        ({"clean_label": None}, "clean_label: NoneType, expected a list"),
        ({"worse_label": np.full(20, 10)}, "worse_label: label 10 at position 0"),
        ({"worse_label": np.zeros(19, int)}, "worse_label: 19 labels for 20 images"),
        ({"worse_label": np.zeros(20)}, "worse_label: label 0.0 at position 0"),
    ],
)
def test_human_labels_that_do_not_match_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    root = write_tree(tmp_path, {**cifar10_pickles(), "h.pt": torch_file({**human10(), **changes})})
    error = error_of(CIFAR10, root, "--human", str(root / "h.pt"))
    assert str(root / "h.pt") in error
    assert message in error


def test_a_human_file_without_known_labels_is_refused(tmp_path: Path) -> None:
    file = torch_file({"clean_label": human10()["clean_label"], "noisy_label": np.zeros(20, int)})
    root = write_tree(tmp_path, {**cifar10_pickles(), "h.pt": file})
    error = error_of(CIFAR10, root, "--human", str(root / "h.pt"))
    assert "contains clean_label, noisy_label; expected any of aggre_label, worse_label" in error
    assert "gone.pt: cannot be read" in error_of(CIFAR10, root, "--human", str(root / "gone.pt"))


def test_a_malicious_human_file_is_refused_and_not_executed(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    file = torch_file({**human10(), "x": Malicious(os.system, f"touch {marker}")})
    root = write_tree(tmp_path, {**cifar10_pickles(), "h.pt": file})
    assert "refers to posix.system" in error_of(CIFAR10, root, "--human", str(root / "h.pt"))
    assert not marker.exists()
