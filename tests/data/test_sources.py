"""Tests of all sources, and helpers to create their file trees."""

from __future__ import annotations

import argparse
import io
import os
import socket
from pathlib import Path

import pytest
from PIL import Image

from sopdist.data.headers import read_header
from sopdist.data.keys import keys_of
from sopdist.data.labels import GIVEN, check_name
from sopdist.data.sources import clothing1m, ilsvrc12, webvision
from sopdist.data.sources.cifar import CIFAR10, CIFAR100
from sopdist.data.sources.lists import numbered_lines, read_labelled, read_names, read_paths, reader
from sopdist.data.sources.source import Source, SourceSplit
from sopdist.errors import DataError, ImageError

SOURCES: dict[str, Source] = {
    "clothing1m": clothing1m,
    "webvision": webvision,
    "ilsvrc12-val": ilsvrc12,
    "cifar10": CIFAR10,
    "cifar100": CIFAR100,
}


def jpeg(number: int) -> bytes:
    """A small real JPEG, different for each number."""
    buffer = io.BytesIO()
    Image.new("RGB", (9 + number % 7, 8), (number * 37 % 256, number * 11 % 256, number % 256)).save(buffer, "JPEG")
    return buffer.getvalue()


def write_tree(root: Path, files: dict[str, bytes | str]) -> Path:
    """Write {path: content} under `root`."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return root


def find(source: Source, root: Path, *options: str) -> dict[str, SourceSplit]:
    """Run the source as `sopdist prepare` does, and check the invariants of every split."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--root")
    parser.add_argument("--splits")
    source.add_arguments(parser)
    splits = {split.name: split for split in source.find_splits(parser.parse_args(["--root", str(root), *options]))}
    for split in splits.values():
        assert GIVEN in split.labels
        assert split.origins.keys() == split.labels.keys()
        assert len(set(split.classes)) == len(split.classes)
        assert len(keys_of(split.paths)) == len(split.paths) > 0
        for name, labels in split.labels.items():
            check_name(name)
            assert labels.dtype == "int64"
            assert labels.shape == (len(split.paths),)
        for number in range(len(split.paths)):
            read_header(split.read(number))
    return splits


def error_of(source: Source, root: Path, *options: str) -> str:
    """The message of the DataError that the source raises for an invalid tree."""
    with pytest.raises(DataError) as caught:
        find(source, root, *options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("clothing1m", "--root annotations/ noisy_label_kv.txt clean_test_key_list.txt images/ Splits: Label sets:"),
        ("webvision", "--root info/synsets.txt train_filelist_google.txt val_images_256/ mini google full Splits:"),
        ("ilsvrc12-val", "--root --synsets --classes-count val/n01440764/ meta.mat val.txt sorted One split, ilsvrc12"),
        ("cifar10", "--root cifar-10-batches-py/ cifar-10-batches-bin/ --human cifar10n-worst Splits: Label sets:"),
        ("cifar100", "--root cifar-100-python/ cifar-100-binary/ --human cifar100n-noisy Splits: Label sets:"),
    ],
)
def test_the_help_of_a_source_shows_the_expected_layout(name: str, words: str) -> None:
    text = SOURCES[name].__doc__ or ""
    assert [word for word in words.split() if word not in text] == []
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize("name", SOURCES)
def test_a_missing_root_is_reported(name: str, tmp_path: Path) -> None:
    options = ["--synsets", "x"] if name == "ilsvrc12-val" else []
    assert "absent: no such folder" in error_of(SOURCES[name], tmp_path / "absent", *options)


def test_lists_keep_unusual_file_names_and_ignore_byte_order_marks_and_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "list.txt"
    path.write_bytes(b"\xef\xbb\xbfa b/c.jpg\t 1\r\n\r\n  caf\xe9\x1c\xe3\x80\x80.jpg 0 \n")
    assert read_labelled(path, 2) == {"a b/c.jpg": 1, "caf\udce9\x1c\u3000.jpg": 0}
    assert [number for number, _ in numbered_lines(path)] == [1, 3]
    assert read_names(path) == ("a b/c.jpg\t 1", "caf\udce9\x1c\u3000.jpg 0")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a.jpg 0\nb.jpg 2\n", "line 2: label '2' of 'b.jpg'; must be from 0 to 1"),
        ("a.jpg 0\nb.jpg -1\n", "line 2: label '-1'"),
        ("a.jpg 1_0\n", "line 1: label '1_0'"),
        ("a.jpg 0\n\nb.jpg\n", "line 3: expected `path label`, found 'b.jpg'"),
        ("a.jpg 0\nb.jpg 0\na.jpg 1\n", "line 3: 'a.jpg' is a duplicate"),
        ("a.jpg 0\n../b.jpg 0\n", "line 2: '../b.jpg' is outside the data set"),
        ("/etc/a.jpg 0\n", "line 1: '/etc/a.jpg' is outside the data set"),
        ("b/a.jpg 0\nb//./a.jpg 0\n", "line 2: 'b/a.jpg' is a duplicate"),
        ("a.jpg 0\nb/ 0\n", "line 2: 'b/' is not the path of a file"),
        (". 0\n", "line 1: '.' is not the path of a file"),
        ("\n", "list.txt: has no usable entries"),
    ],
)
def test_an_invalid_line_is_reported_with_file_and_line_number(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "list.txt"
    path.write_text(content)
    with pytest.raises(DataError) as caught:
        read_labelled(path, 2)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


def test_paths_in_lists_are_normalised(tmp_path: Path) -> None:
    path = tmp_path / "list.txt"
    path.write_text("google//x.jpg 0\n./a./b.jpg 1\n")
    assert list(read_labelled(path, 2)) == ["google/x.jpg", "a./b.jpg"]
    assert keys_of(list(read_labelled(path, 2))) == ["google/x", "a%2E/b"]
    path.write_text("google//x.jpg\n")
    assert read_paths(path) == {"google/x.jpg": 1}


def test_a_backslash_is_an_ordinary_character() -> None:
    assert keys_of(["a/b\\c.jpg", "a/b/c.jpg"]) == ["a/b%5Cc", "a/b/c"]


def test_only_regular_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "device.jpg").symlink_to("/dev/zero")
    (tmp_path / "folder.jpg").mkdir()
    (tmp_path / "large.jpg").touch()
    os.truncate(tmp_path / "large.jpg", (1 << 30) + 1)
    monkeypatch.chdir(tmp_path)  # the name of a socket must be short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket.jpg")
        read = reader(tmp_path, ["pipe.jpg", "device.jpg", "folder.jpg", "socket.jpg", "large.jpg", "none.jpg"])
        for number in range(4):
            with pytest.raises(ImageError, match="not a regular file"):
                read(number)
    with pytest.raises(ImageError, match="1,073,741,825 bytes, more than"):
        read(4)
    with pytest.raises(FileNotFoundError):
        read(5)


def test_a_duplicate_path_in_a_key_list_is_reported_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "list.txt"
    path.write_text("a.jpg\n\nb..jpg\na.jpg\n")
    with pytest.raises(DataError, match=r"list\.txt, line 4: 'a\.jpg' is a duplicate"):
        read_paths(path)
