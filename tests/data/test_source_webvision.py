"""WebVision 1.0: the mini, Google and full subsets, and missing or invalid lists."""

from __future__ import annotations

from pathlib import Path

import pytest

from sopdist.data.sources import webvision

from .test_sources import error_of, find, jpeg, write_tree

SYNSETS = [f"n{(7 * label) % 1000 + 1440764:08d} thing {label}, res {label}" for label in range(1000)]
# The labels are not sorted, 50 is the first that is not in mini, and one name contains blanks.
GOOGLE = {"q0002/b.jpg": 1, "q0001/a b  c.jpg": 0, "q0099/x.jpg": 50, "q0098/y.jpg": 49, "q1632/z.jpg": 999}
FLICKR = {"q0001/1.jpg": 0, "q0002/b.jpg": 1}  # the second also exists in google/
VAL = {"val000001.jpg": 3, "val000002.jpg": 999, "val000003.jpg": 49}
IMAGES = {
    path: jpeg(number)
    for number, path in enumerate(
        [f"google/{p}" for p in GOOGLE] + [f"flickr/{p}" for p in FLICKR] + [f"val_images_256/{p}" for p in VAL]
    )
}


def labelled(labels: dict[str, int], prefix: str = "") -> str:
    return "".join(f"{prefix}{path} {label}\n" for path, label in labels.items())


def lists(google: str = "google/", flickr: str = "flickr/") -> dict[str, str]:
    return {
        "info/synsets.txt": "\n".join(SYNSETS) + "\n",
        "info/train_filelist_google.txt": labelled(GOOGLE, google),
        "info/train_filelist_flickr.txt": labelled(FLICKR, flickr),
        "info/val_filelist.txt": labelled(VAL),
    }


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return write_tree(tmp_path, {**lists(), **IMAGES})


@pytest.mark.parametrize("prefix", ["google/", ""])
def test_mini_is_the_first_fifty_classes_of_google_in_file_order(prefix: str, tmp_path: Path) -> None:
    splits = find(webvision, write_tree(tmp_path, {**lists(prefix), **IMAGES}))
    train, val = splits["train"], splits["val"]
    assert train.paths == ["google/q0002/b.jpg", "google/q0001/a b  c.jpg", "google/q0098/y.jpg"]
    assert train.labels["given"].tolist() == [1, 0, 49]
    assert train.labels.keys() == {"given"}
    assert [train.read(number) for number in range(3)] == [IMAGES[path] for path in train.paths]
    assert val.paths == ["val_images_256/val000001.jpg", "val_images_256/val000003.jpg"]
    assert val.labels["given"].tolist() == val.labels["clean"].tolist() == [3, 49]
    assert [val.read(number) for number in range(2)] == [IMAGES[path] for path in val.paths]
    assert train.classes == val.classes == tuple(SYNSETS[:50])
    assert train.dataset == "webvision-mini"


def test_google_is_the_full_google_list(tree: Path) -> None:
    splits = find(webvision, tree, "--subset", "google")
    assert splits["train"].paths == [f"google/{path}" for path in GOOGLE]
    assert splits["train"].labels["given"].tolist() == list(GOOGLE.values())
    assert splits["train"].classes == tuple(SYNSETS)
    assert splits["val"].labels["given"].tolist() == list(VAL.values())


@pytest.mark.parametrize("prefixes", [("google/", "flickr/"), ("", "")])
def test_full_without_its_own_list_is_google_followed_by_flickr(prefixes: tuple[str, str], tmp_path: Path) -> None:
    train = find(webvision, write_tree(tmp_path, {**lists(*prefixes), **IMAGES}), "--subset", "full")["train"]
    assert train.paths == [f"google/{path}" for path in GOOGLE] + [f"flickr/{path}" for path in FLICKR]
    assert train.labels["given"].tolist() == [*GOOGLE.values(), *FLICKR.values()]
    assert train.origins["given"]["files"] == ["train_filelist_google.txt", "train_filelist_flickr.txt"]


def test_full_uses_its_own_list_if_it_exists(tree: Path) -> None:
    write_tree(tree, {"info/train_filelist_all.txt": labelled(FLICKR, "flickr/") + labelled(GOOGLE, "google/")})
    train = find(webvision, tree, "--subset", "full")["train"]
    assert train.paths == [f"flickr/{path}" for path in FLICKR] + [f"google/{path}" for path in GOOGLE]
    assert train.origins["given"]["files"] == ["train_filelist_all.txt"]
    assert find(webvision, tree)["train"].paths[0] == "google/q0002/b.jpg"  # mini does not use it


def test_a_full_list_without_google_or_flickr_prefixes_is_refused(tree: Path) -> None:
    write_tree(tree, {"info/train_filelist_all.txt": labelled(FLICKR)})
    error = error_of(webvision, tree, "--subset", "full")
    assert "train_filelist_all.txt: 'q0001/1.jpg' does not start with google/ or flickr/" in error


def test_val_lines_may_include_their_folder(tree: Path) -> None:
    write_tree(tree, {"info/val_filelist.txt": labelled(VAL, "val_images_256/")})
    assert find(webvision, tree)["val"].paths == ["val_images_256/val000001.jpg", "val_images_256/val000003.jpg"]


@pytest.mark.parametrize(
    ("name", "subset"),
    [
        ("synsets.txt", "mini"),
        ("val_filelist.txt", "mini"),
        ("train_filelist_google.txt", "google"),
        ("train_filelist_flickr.txt", "full"),
    ],
)
def test_a_missing_list_is_reported_with_the_folders_searched(name: str, subset: str, tree: Path) -> None:
    (tree / "info" / name).rename(tree / "info" / f"old-{name}")
    assert f"missing: {name}; looked in {tree / 'info'}, {tree}" in error_of(webvision, tree, "--subset", subset)


@pytest.mark.parametrize("folder", ["google", "val_images_256"])
def test_a_missing_image_folder_is_reported(folder: str, tree: Path) -> None:
    (tree / folder).rename(tree / "elsewhere")
    assert f"{tree / folder}: no such folder" in error_of(webvision, tree)


def test_files_of_splits_that_are_not_selected_may_be_missing(tree: Path) -> None:
    (tree / "val_images_256").rename(tree / "elsewhere")
    (tree / "info" / "val_filelist.txt").unlink()
    assert list(find(webvision, tree, "--splits", "train")) == ["train"]
    (tree / "elsewhere").rename(tree / "val_images_256")
    (tree / "google").rename(tree / "away")
    write_tree(tree, {"info/val_filelist.txt": labelled(VAL)})
    assert list(find(webvision, tree, "--splits", "val")) == ["val"]
    assert "no split 'test'; available: train, val" in error_of(webvision, tree, "--splits", "val,test")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("synsets.txt", "n01440764 tench\ntench\n", "synsets.txt, line 2: expected `WNID words`, found 'tench'"),
        ("synsets.txt", "n01440764 a\nn01440764 b\n", "synsets.txt, line 2: duplicate n01440764"),
        ("synsets.txt", "\n".join(SYNSETS[:49]), "synsets.txt: 49 classes, mini WebVision needs the first 50"),
        ("train_filelist_google.txt", "google/a.jpg 0\ngoogle/b.jpg 1000", "google.txt, line 2: label '1000'"),
        ("train_filelist_google.txt", "google/a.jpg 0\ngoogle/a.jpg 1", "google.txt, line 2: 'google/a.jpg' is a dup"),
        ("train_filelist_google.txt", "google/a.jpg 0\na.jpg 1", "both with and without the prefix google/"),
        ("val_filelist.txt", "val000001.jpg\n", "val_filelist.txt, line 1: expected `path label`"),
    ],
)
def test_an_error_in_a_list_is_reported(file: str, content: str, message: str, tree: Path) -> None:
    write_tree(tree, {f"info/{file}": content})
    assert message in error_of(webvision, tree)
