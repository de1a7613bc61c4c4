"""Clothing1M: its lists in several locations, noisy and clean labels, and missing files."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sopdist.data.sources import clothing1m

from .test_sources import error_of, find, jpeg, write_tree

NAMES = [
    "T-Shirt", "Shirt", "Knitwear", "Chiffon", "Sweater", "Hoodie", "Windbreaker", "Jacket", "Down Coat", "Suit",
    "Shawl", "Dress", "Vest", "Underwear",
]  # fmt: skip
# Subfolders vary, names contain commas, and the list is not sorted.
TRAIN = ["images/9/51/30,7.jpg", "images/0/1.jpg", "images/0/02/2,22.jpg", "images/0/a.b/3.jpg"]
CLEAN = {
    "clean_train": ["images/5/5,5.jpg", "images/4/4.jpg"],
    "val": ["images/6/6.jpg", "images/0/1.jpg"],  # the second is in train, too
    "test": ["images/7/7.jpg"],
}
NOISY_LABEL = {**dict(zip(TRAIN, [3, 13, 0, 5], strict=True)), "images/4/4.jpg": 2}
CLEAN_LABEL = {
    "images/5/5,5.jpg": 1, "images/4/4.jpg": 12, "images/6/6.jpg": 0, "images/0/1.jpg": 11, "images/7/7.jpg": 13,
}  # fmt: skip
IMAGES = {path: jpeg(number) for number, path in enumerate(sorted({*NOISY_LABEL, *CLEAN_LABEL}))}


def lists() -> dict[str, str]:
    return {
        "category_names_eng.txt": "\n".join(NAMES) + "\n",
        "noisy_label_kv.txt": "".join(f"{path}\t{label}\n" for path, label in NOISY_LABEL.items()),
        "clean_label_kv.txt": "".join(f"{path} {label}\r\n" for path, label in CLEAN_LABEL.items()),
        "noisy_train_key_list.txt": "\n".join(TRAIN),
        "clean_train_key_list.txt": "\n".join(CLEAN["clean_train"]) + "\n\n",
        "clean_val_key_list.txt": "\n".join(CLEAN["val"]) + "\n",
        "clean_test_key_list.txt": "\n".join(CLEAN["test"]) + "\n",
    }


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return write_tree(tmp_path / "c1m", {**lists(), **IMAGES})


def check(root: Path) -> None:
    splits = find(clothing1m, root)
    assert list(splits) == ["train", "clean_train", "val", "test"]
    assert splits["train"].classes == tuple(NAMES)
    assert splits["train"].paths == TRAIN
    for split in splits.values():
        assert [split.read(number) for number in range(len(split.paths))] == [IMAGES[path] for path in split.paths]
    assert splits["train"].labels["given"].tolist() == [3, 13, 0, 5]
    assert splits["train"].labels["clean"].tolist() == [-1, 11, -1, -1]
    for name, paths in CLEAN.items():
        assert splits[name].paths == paths
        for labels in splits[name].labels.values():
            assert labels.tolist() == [CLEAN_LABEL[path] for path in paths]
        assert splits[name].labels.keys() == {"given", "clean"}


def test_lists_may_be_in_the_root(tree: Path) -> None:
    check(tree)


def test_lists_may_be_in_annotations(tmp_path: Path) -> None:
    check(write_tree(tmp_path, {**{f"annotations/{name}": text for name, text in lists().items()}, **IMAGES}))


@pytest.mark.parametrize("folder", ["", "annotations/"])
def test_a_root_that_is_the_images_folder_gives_the_same_keys(folder: str, tmp_path: Path) -> None:
    images = {path.removeprefix("images/"): content for path, content in IMAGES.items()}
    check(write_tree(tmp_path, {**{folder + name: text for name, text in lists().items()}, **images}))


@pytest.mark.parametrize("folder", ["", "annotations/"])
def test_the_lists_may_be_next_to_a_root_that_is_the_images_folder(folder: str, tmp_path: Path) -> None:
    write_tree(tmp_path, {**{folder + name: text for name, text in lists().items()}, **IMAGES})
    check(tmp_path / "images")


def test_the_noise_rate_is_measured_where_clean_labels_are_known(tree: Path) -> None:
    origins = find(clothing1m, tree)["train"].origins
    assert origins["given"] == {"source": "clothing1m", "file": "noisy_label_kv.txt", "noise_rate_where_known": 1.0}
    assert origins["clean"] == {"source": "clothing1m", "file": "clean_label_kv.txt", "known": 1}


def test_train_has_no_clean_labels_if_no_image_has_both_labels(tree: Path) -> None:
    write_tree(tree, {"noisy_train_key_list.txt": TRAIN[0]})
    assert find(clothing1m, tree)["train"].labels.keys() == {"given"}


def test_a_missing_image_raises_an_os_error_only_when_it_is_read(tree: Path) -> None:
    splits = find(clothing1m, tree)
    (tree / TRAIN[1]).unlink()
    with pytest.raises(FileNotFoundError):
        splits["train"].read(1)
    assert splits["train"].read(2) == IMAGES[TRAIN[2]]


def test_all_missing_lists_are_reported_with_the_folders_searched(tree: Path) -> None:
    (tree / "noisy_label_kv.txt").unlink()
    (tree / "clean_val_key_list.txt").unlink()
    error = error_of(clothing1m, tree)
    assert f"missing: noisy_label_kv.txt, clean_val_key_list.txt; looked in {tree}, {tree / 'annotations'}" in error


def test_files_of_splits_that_are_not_selected_may_be_missing(tree: Path) -> None:
    everything = find(clothing1m, tree)
    for name in ("clean_train", "clean_val", "clean_test"):
        (tree / f"{name}_key_list.txt").unlink()
    train = find(clothing1m, tree, "--splits", "train")
    assert list(train) == ["train"]
    assert train["train"].labels["clean"].tolist() == everything["train"].labels["clean"].tolist()
    write_tree(tree, lists())
    for name in ("noisy_label_kv.txt", "noisy_train_key_list.txt", "clean_train_key_list.txt"):
        (tree / name).unlink()
    clean = find(clothing1m, tree, "--splits", "test,val")
    assert list(clean) == ["val", "test"]
    for name, split in clean.items():
        assert split.paths == everything[name].paths
        assert split.labels["given"].tolist() == everything[name].labels["given"].tolist()
    (tree / "clean_label_kv.txt").unlink()
    assert "missing: clean_label_kv.txt;" in error_of(clothing1m, tree, "--splits", "test")


def test_the_error_for_a_copy_sorted_into_folders_names_the_missing_files(tmp_path: Path) -> None:
    folders = ("noisy_train", "clean_train", "val", "test")
    write_tree(tmp_path, {f"{name}/q0003/1,2.jpg": jpeg(1) for name in folders})
    error = error_of(clothing1m, tmp_path)
    assert "sorted into folders (noisy_train, clean_train, val, test), without the annotation files" in error
    assert "noisy_label_kv.txt" in error


def test_lists_without_images_are_refused(tree: Path) -> None:
    shutil.rmtree(tree / "images")
    error = error_of(clothing1m, tree)
    assert f"neither a folder {tree / 'images'} nor" in error
    assert str(tree / "0") in error


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("category_names_eng.txt", "a\nb\n", "category_names_eng.txt: 2 class names, expected 14"),
        ("noisy_label_kv.txt", "images/0/1.jpg 14\n", "noisy_label_kv.txt, line 1: label '14' of 'images/0/1.jpg'"),
        ("clean_label_kv.txt", "images/0/1.jpg 3\nimages/0/1.jpg 4\n", "clean_label_kv.txt, line 2: 'images/0/1.jpg'"),
        ("noisy_train_key_list.txt", "\n".join([*TRAIN, TRAIN[0]]), "noisy_train_key_list.txt, line 5: 'images/9/51"),
        ("noisy_train_key_list.txt", "images/0/1.jpg\n\nimages/x.jpg", "key_list.txt, line 3: 'images/x.jpg' has no"),
        ("clean_test_key_list.txt", "images/0/02/2,22.jpg", "clean_test_key_list.txt, line 1: 'images/0/02/2,22.jpg'"),
    ],
)
def test_an_error_in_a_list_is_reported_with_file_and_line(file: str, content: str, message: str, tree: Path) -> None:
    write_tree(tree, {file: content})
    assert message in error_of(clothing1m, tree)
