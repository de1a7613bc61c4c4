"""Sources for the user's own data (folders, tables), digits, Fashion-MNIST, and the list of all sources."""

from __future__ import annotations

import argparse
import gzip
import io
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from sopdist.cli import main
from sopdist.data.headers import read_header
from sopdist.data.labels import CLEAN, GIVEN
from sopdist.data.sources import SOURCES, csv_list, digits, fashion_mnist, imagefolder, load_source
from sopdist.data.sources.source import SourceSplit
from sopdist.data.split import open_split
from sopdist.errors import DataError

from ..support.pictures import encoded, picture

JPEG = encoded(picture(0))


def find(source: str, root: Path | None, *options: str, out: Path = Path("nowhere")) -> dict[str, SourceSplit]:
    parser = argparse.ArgumentParser()
    module = load_source(source)
    module.add_arguments(parser)
    args = parser.parse_args(options)
    args.root, args.out, args.splits = root, out, None
    return {split.name: split for split in module.find_splits(args)}


def write_images(root: Path, *paths: str) -> None:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(JPEG)


def pixels_of(content: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(content)))


# -- the list ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_can_be_imported_and_its_help_shows_its_layout(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = load_source(name)
    with pytest.raises(SystemExit) as stop:
        main(["prepare", name, "--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert (source.__doc__ or "").strip() in out
    for option in ("--root", "--out", "--resize", "--max-bad", "--samples-per-shard", "--overwrite"):
        assert option in out


def test_the_help_of_prepare_lists_all_sources(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["prepare", "--help"])
    out = capsys.readouterr().out
    names = ("clothing1m", "webvision", "ilsvrc12-val", "cifar10", "cifar100", "fashion-mnist", "digits", "imagefolder")
    assert tuple(SOURCES) == (*names, "csv")
    for name in SOURCES:
        assert f"\n    {name}" in out
    with pytest.raises(SystemExit) as stop:
        main(["prepare", "imagenet"])
    assert stop.value.code == 2


def test_a_missing_root_is_an_error_without_a_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["prepare", "csv", "--out", str(tmp_path)])
    assert "--root" in capsys.readouterr().err
    assert main(["prepare", "csv", "--root", str(tmp_path / "gone"), "--out", str(tmp_path / "out")]) == 1
    assert "gone: no such folder" in capsys.readouterr().err


# -- digits and Fashion-MNIST ------------------------------------------------------------------------------------------


def test_digits_are_those_of_scikit_learn_split_by_class(tmp_path: Path) -> None:
    assert main(["prepare", "digits", "--out", str(tmp_path), "--samples-per-shard", "500"]) == 0
    values, labels = load_digits(return_X_y=True)
    seen = []
    for name, fraction in (("train", 0.8), ("test", 0.2)):
        with open_split(tmp_path / name) as split:
            given = split.labels(GIVEN).labels
            np.testing.assert_array_equal(given, split.labels(CLEAN).labels)
            assert np.bincount(given) == pytest.approx(fraction * np.bincount(labels), abs=1)
            for index in range(0, len(split), 7):
                number = int(split.record(index)["path"].removesuffix(".png"))
                assert given[index] == labels[number]
                expected = [[int(value * 255 / 16 + 0.5) for value in row] for row in values[number].reshape(8, 8)]
                assert pixels_of(split.image(index)).tolist() == expected
            seen += [split.record(index)["path"] for index in range(len(split))]
    assert sorted(seen) == [f"{number:04d}.png" for number in range(1797)]
    with pytest.raises(DataError, match="leave --root out"):
        find("digits", tmp_path)
    assert digits.__doc__


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_fashion(root: Path, compressed: bool = True, counts: tuple[int, int] = (7, 3)) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    arrays = {}
    for prefix, count in zip(("train", "t10k"), counts, strict=True):
        arrays[f"{prefix}-images-idx3-ubyte"] = draw.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        arrays[f"{prefix}-labels-idx1-ubyte"] = draw.integers(0, 10, count, dtype=np.uint8)
    root.mkdir(parents=True, exist_ok=True)
    for name, array in arrays.items():
        content = idx(array)
        (root / f"{name}{'.gz' if compressed else ''}").write_bytes(gzip.compress(content) if compressed else content)
    return arrays


@pytest.mark.parametrize(("compressed", "folder"), [(True, ""), (False, ""), (True, "FashionMNIST/raw")])
def test_fashion_mnist_may_be_compressed_or_not(tmp_path: Path, compressed: bool, folder: str) -> None:
    arrays = write_fashion(tmp_path / folder, compressed)
    splits = find("fashion-mnist", tmp_path)
    for name, prefix in (("train", "train"), ("test", "t10k")):
        split, images = splits[name], arrays[f"{prefix}-images-idx3-ubyte"]
        assert [pixels_of(split.read(n)).tolist() for n in range(len(images))] == images.tolist()
        assert read_header(split.read(0)).plain
        for label_set in (GIVEN, CLEAN):
            assert split.labels[label_set].tolist() == arrays[f"{prefix}-labels-idx1-ubyte"].tolist()
    assert splits["train"].classes[9] == "Ankle boot"


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("train-images-idx3-ubyte.gz", lambda content: content[:-20], "truncated"),
        ("train-images-idx3-ubyte.gz", lambda content: b"BZh9" + content[4:], "damaged"),
        ("train-images-idx3-ubyte.gz", lambda _: gzip.compress(b"\0\0\x08\x01" + bytes(12)), "3 dimensions"),
        ("train-images-idx3-ubyte.gz", lambda _: gzip.compress(b"\0\0\x08\x03" + bytes(5)), "truncated header"),
        ("train-images-idx3-ubyte.gz", lambda _: gzip.compress(idx(np.zeros((7, 32, 32), np.uint8))), "32 x 32"),
        ("train-labels-idx1-ubyte.gz", lambda _: gzip.compress(idx(np.zeros(6, np.uint8))), "6 labels"),
        ("train-labels-idx1-ubyte.gz", lambda _: gzip.compress(idx(np.zeros(7, np.uint8))[:-1]), "truncated: 14 bytes"),
        ("t10k-labels-idx1-ubyte.gz", lambda _: gzip.compress(idx(np.full(3, 10, np.uint8))), "label 10"),
        ("t10k-labels-idx1-ubyte.gz", lambda _: gzip.compress(idx(np.zeros(3, np.uint8)) + b"!"), "too long"),
    ],
)
def test_damaged_idx_files_are_reported(tmp_path: Path, name: str, change: object, says: str) -> None:
    write_fashion(tmp_path)
    (tmp_path / name).write_bytes(change((tmp_path / name).read_bytes()))
    with pytest.raises(DataError, match=says) as caught:
        find("fashion-mnist", tmp_path)
    assert str(tmp_path / name) in str(caught.value)


def test_all_missing_idx_files_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_fashion(tmp_path)
    (tmp_path / "t10k-images-idx3-ubyte.gz").unlink()
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError, match=r"missing: t10k-images-idx3-ubyte, t10k-labels-idx1-ubyte; looked in"):
        find("fashion-mnist", tmp_path)
    monkeypatch.setattr(fashion_mnist, "_DEBIAN", tmp_path / "none")
    with pytest.raises(DataError, match=r"--root.*dataset-fashion-mnist"):
        find("fashion-mnist", None)


@pytest.mark.skipif(not fashion_mnist._DEBIAN.is_dir(), reason="needs Debian's dataset-fashion-mnist")
def test_the_real_fashion_mnist_is_found_without_root() -> None:
    splits = find("fashion-mnist", None)
    assert {name: len(split.paths) for name, split in splits.items()} == {"train": 60_000, "test": 10_000}
    assert np.bincount(splits["train"].labels[GIVEN]).tolist() == [6000] * 10


# -- one folder per class ----------------------------------------------------------------------------------------------


def test_folders_and_files_are_sorted_by_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_images(
        tmp_path,
        "cat/b.JPG", "cat/a.jpeg", "cat/Z.png", "cat/sub/deep/er/1.webp", "cat/sub.x/2.gif", "Dog/1.tiff",
        "cat-2/1.bmp", ".hidden/1.jpg", "cat/.hidden.jpg", "cat/.cache/1.jpg", "cat/notes.txt", "cat/README",
        "stray.txt", "top.jpg",
    )  # fmt: skip
    (split,) = find("imagefolder", tmp_path).values()
    assert split.name == "train"
    assert split.classes == ("Dog", "cat", "cat-2")
    assert split.paths == [
        "Dog/1.tiff",
        "cat/Z.png", "cat/a.jpeg", "cat/b.JPG", "cat/sub.x/2.gif", "cat/sub/deep/er/1.webp",
        "cat-2/1.bmp",
    ]  # fmt: skip
    assert split.labels[GIVEN].tolist() == [0, 1, 1, 1, 1, 1, 2]
    assert split.read(3) == JPEG
    assert (
        "4 other files are skipped: 1 without extension, 2 .txt, 1 images outside all class folders\n"
        in capsys.readouterr().err
    )


def test_split_folders_must_have_the_same_classes(tmp_path: Path) -> None:
    write_images(tmp_path, "train/a/1.jpg", "train/b/2.jpg", "val/a/3.jpg", "val/b/4.jpg", "test/a/5.jpg")
    with pytest.raises(DataError, match=r"test: lacks classes of .*train: 'b'"):
        find("imagefolder", tmp_path)
    (tmp_path / "test" / "b").mkdir()
    splits = find("imagefolder", tmp_path)
    assert list(splits) == ["train", "val", "test"]
    assert splits["val"].paths == ["val/a/3.jpg", "val/b/4.jpg"]
    assert splits["test"].labels[GIVEN].tolist() == [0]
    write_images(tmp_path, "val/c/6.jpg")
    with pytest.raises(DataError, match=r"val: has classes that are not in .*train: 'c'"):
        find("imagefolder", tmp_path)


def test_train_may_be_a_class_if_that_is_unambiguous(tmp_path: Path) -> None:
    write_images(tmp_path, "train/1.jpg", "plane/2.jpg")
    assert find("imagefolder", tmp_path)["train"].classes == ("plane", "train")
    write_images(tmp_path, "train/express/3.jpg")
    with pytest.raises(DataError, match=r"train/ looks like a split, but 'plane' next to it does not"):
        find("imagefolder", tmp_path)


def test_a_root_at_the_wrong_level_is_refused(tmp_path: Path) -> None:
    write_images(tmp_path, "in/images/a/1.jpg", "in/images/b/2.jpg")
    for root in (tmp_path / "in", tmp_path / "in" / "images" / "a"):
        with pytest.raises(DataError, match="a level too high or too low"):
            find("imagefolder", root)
    with pytest.raises(DataError, match="inside --root"):
        find("imagefolder", tmp_path / "in" / "images", out=tmp_path / "in" / "images" / "shards")


def test_links_are_followed_once_and_loops_terminate(tmp_path: Path) -> None:
    write_images(tmp_path / "elsewhere", "1.jpg", "more/2.jpg")
    write_images(tmp_path / "in", "a/3.jpg")
    (tmp_path / "in" / "b").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "in" / "a" / "up").symlink_to(tmp_path / "in")
    (tmp_path / "in" / "a" / "self").symlink_to("self")
    (tmp_path / "in" / "a" / "round.jpg").symlink_to("round.jpg")
    (tmp_path / "elsewhere" / "more" / "back").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "again").symlink_to("more")
    os.mkfifo(tmp_path / "in" / "a" / "pipe.jpg")  # reading it would block
    paths = find("imagefolder", tmp_path / "in")["train"].paths
    assert paths == ["a/3.jpg", "a/round.jpg", "b/1.jpg", "b/more/2.jpg"]
    assert imagefolder.__doc__


def test_a_link_into_another_class_does_not_change_the_class_of_its_images(tmp_path: Path) -> None:
    write_images(tmp_path, "a/1.jpg", "b/2.jpg", "b/sub/3.jpg", "c/4.jpg")
    (tmp_path / "a" / "tob").symlink_to("../b")
    (tmp_path / "a" / "tosub").symlink_to("../b/sub")
    (tmp_path / "b" / "toc").symlink_to("../c")
    (split,) = find("imagefolder", tmp_path).values()
    assert split.paths == ["a/1.jpg", "b/2.jpg", "b/sub/3.jpg", "c/4.jpg"]
    assert split.labels[GIVEN].tolist() == [0, 1, 1, 2]
    (tmp_path / "d").symlink_to("b")
    with pytest.raises(DataError, match="d: is a link to the folder of another class"):
        find("imagefolder", tmp_path)


def test_comparing_many_classes_takes_linear_time(tmp_path: Path) -> None:
    class Counted(list[str]):
        passes = 0

        def __iter__(self) -> Iterator[str]:
            Counted.passes += 1
            return super().__iter__()

    names = Counted(map(str, range(100)))
    imagefolder._check_classes(tmp_path, names, tmp_path, names)
    assert Counted.passes < 10


# -- a table -----------------------------------------------------------------------------------------------------------


def write_table(root: Path, text: str | bytes, name: str = "labels.csv") -> Path:
    root.mkdir(exist_ok=True)
    (root / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return root


def test_a_table_with_all_columns_and_unusual_formatting(tmp_path: Path) -> None:
    write_images(tmp_path, "x/a.jpg", "x/b, c.jpg", "d.jpg")
    table = (
        "\ufeffsplit, label ,path,clean\r\n"
        "\r\n"
        "train,cat,x/a.jpg,dog\r\n"
        'val, Dog ,"x/b, c.jpg",-1\r\n'
        ",,,\r\n"
        'train,"dog",./d.jpg,\r\n'
    )
    splits = find("csv", write_table(tmp_path, table))
    assert list(splits) == ["train", "val"]
    train, val = splits.values()
    assert train.classes == val.classes == ("Dog", "cat", "dog")
    assert (train.paths, val.paths) == (["x/a.jpg", "d.jpg"], ["x/b, c.jpg"])
    assert (train.labels[GIVEN].tolist(), train.labels[CLEAN].tolist()) == ([1, 2], [2, -1])
    assert (val.labels[GIVEN].tolist(), val.labels[CLEAN].tolist()) == ([0], [-1])
    assert val.read(0) == JPEG


def test_labels_are_numbers_names_or_lines_of_a_class_list(tmp_path: Path) -> None:
    write_table(tmp_path, "path,label\na.jpg,3\nb.jpg,0\n")
    assert find("csv", tmp_path)["train"].classes == ("0", "1", "2", "3")
    assert CLEAN not in find("csv", tmp_path)["train"].labels
    names = tmp_path / "names.txt"
    names.write_text("zebra\nape\n\ncow\nbee\n")
    write_table(tmp_path, "path,label\na.jpg,bee\nb.jpg,0\nc.jpg,ape\n", "other.csv")
    (split,) = find("csv", tmp_path, "--csv", str(tmp_path / "other.csv"), "--classes", str(names)).values()
    assert split.classes == ("zebra", "ape", "cow", "bee")
    assert split.labels[GIVEN].tolist() == [3, 0, 1]


def test_class_names_that_are_numbers_need_the_option_as(tmp_path: Path) -> None:
    write_table(tmp_path, "path,label,clean\na.jpg,0,2\nb.jpg,1,-1\nc.jpg,2,2\n")
    names = tmp_path / "names.txt"
    names.write_text("1\n2\n3\n")
    with pytest.raises(DataError, match=r"labels.csv, line 2: '2' is ambiguous|line 3: '1' is ambiguous.*--as"):
        find("csv", tmp_path, "--classes", str(names))
    (split,) = find("csv", tmp_path, "--classes", str(names), "--as", "numbers").values()
    assert (split.labels[GIVEN].tolist(), split.labels[CLEAN].tolist()) == ([0, 1, 2], [2, -1, 2])
    with pytest.raises(DataError, match=r"line 2: no class '0'"):
        find("csv", tmp_path, "--classes", str(names), "--as", "names")
    write_table(tmp_path, "path,label\na.jpg,1\nb.jpg,3\n")
    (split,) = find("csv", tmp_path, "--classes", str(names), "--as", "names").values()
    assert split.labels[GIVEN].tolist() == [0, 2]


def test_labels_stay_numbers_with_unknown_labels_or_leading_zeros(tmp_path: Path) -> None:
    write_table(tmp_path, "path,label\n" + "".join(f"{n}.jpg,{label}\n" for n, label in enumerate((10, 9, -1, 2))))
    (split,) = find("csv", tmp_path).values()
    assert split.classes == tuple(map(str, range(11)))
    assert split.labels[GIVEN].tolist() == [10, 9, -1, 2]
    write_table(tmp_path, "path,label\na.jpg,00\nb.jpg,01\nc.jpg,10\nd.jpg,1\n")
    assert find("csv", tmp_path)["train"].labels[GIVEN].tolist() == [0, 1, 10, 1]
    write_table(tmp_path, "path,label\na.jpg,cat\nb.jpg,-1\n")
    (split,) = find("csv", tmp_path).values()
    assert (split.classes, split.labels[GIVEN].tolist()) == (("cat",), [0, -1])


@pytest.mark.parametrize("odd", ["nan", "n/a", "1.0", "-2", "cat"])
def test_a_label_that_is_not_a_number_among_numbers_is_reported(tmp_path: Path, odd: str) -> None:
    write_table(tmp_path, f"path,label\na.jpg,3\nb.jpg,10\nc.jpg,{odd}\nd.jpg,2\n")
    says = f"labels.csv, line 4: label '{odd}' is not an integer >= 0, but others are, e.g. '3' in line 2"
    with pytest.raises(DataError, match=says):
        find("csv", tmp_path)
    with pytest.raises(DataError, match=f"line 4: label '{odd}' is not a class index"):
        find("csv", tmp_path, "--as", "numbers")
    (split,) = find("csv", tmp_path, "--as", "names").values()
    assert split.classes == tuple(sorted(("3", "10", odd, "2")))
    write_table(tmp_path, "path,label\na.jpg,0.0\nb.jpg,1.0\n")  # as pandas writes integers
    with pytest.raises(DataError, match=r"line 2: label '0.0' is not an integer >= 0; write"):
        find("csv", tmp_path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"path,label\na.jpg,cat\ncaf\xe9.jpg,dog\n", r"line 3: not UTF-8 \(byte 0xe9\).*iconv -f WINDOWS-1252"),
        (b"\xef\xbb\xbfpath,label\na.jpg,\xe9\n", r"line 2: not UTF-8 \(byte 0xe9\)"),
        ("path,label\na.jpg,cat\n".encode("utf-16"), r"line 1: not UTF-8.*iconv -f UTF-16 -t UTF-8"),
        (b"path;label\na.jpg;cat\n", "line 1: columns path;label.*separated by commas.*semicolons"),
        (b"path\tlabel\na.jpg\tcat\n", "line 1: columns .*separated by commas.*tabs"),
    ],
)
def test_a_table_with_another_encoding_or_separator_is_refused_with_advice(
    tmp_path: Path, content: bytes, says: str
) -> None:
    with pytest.raises(DataError, match=says):
        find("csv", write_table(tmp_path, content))


def test_paths_in_a_table_may_contain_any_characters_and_may_be_links(tmp_path: Path) -> None:
    write_images(tmp_path / "far", "1.jpg")
    root = write_table(tmp_path / "in", "path,label\ncafé.jpg,a\nlink.jpg,b\n")
    (root / "café.jpg").write_bytes(JPEG)
    (root / "link.jpg").symlink_to(tmp_path / "far" / "1.jpg")
    assert main(["prepare", "csv", "--root", str(root), "--out", str(tmp_path / "out")]) == 0
    with open_split(tmp_path / "out" / "train") as split:
        assert [split.record(i) for i in range(2)] == [
            {"label": 0, "path": "café.jpg"},
            {"label": 1, "path": "link.jpg"},
        ]
        assert split.image(0) == split.image(1) == JPEG
    assert csv_list.__doc__


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no images"),
        ("path,label\n", "has no images"),
        ("file,label\na.jpg,1\n", "line 1: columns file,label; expected path,label"),
        ("path,label,cleaned\na.jpg,1,2\n", "columns path,label,cleaned"),
        ("path,label,label\na.jpg,1,2\n", "columns path,label,label"),
        ("a.jpg,1\n", "columns a.jpg,1"),
        ("path,label\na.jpg,1\n\nb.jpg\n", "line 4: 1 fields, expected 2"),
        ("path,label\na.jpg,1,2\n", "line 2: 3 fields"),
        ("path,label\na.jpg,1\nb.jpg,\n", "line 3: 'b.jpg' has no label"),
        ("path,label\na.jpg,1\nb.jpg,0\na.jpg,1\n", "line 4: 'a.jpg' is a duplicate of line 2"),
        ("path,label\n../a.jpg,1\n", "line 2: '../a.jpg': not a plain relative path"),
        ("path,label\nx/../../a.jpg,1\n", "line 2: .* not a plain relative path"),
        ("path,label\n/etc/passwd,1\n", "line 2: '/etc/passwd': not a plain relative path"),
        ("path,label\n,1\n", "line 2: '': not a plain relative path"),
        ("path,label\na.jpg,-1\nb.jpg,-1\n", "all labels are -1"),
        ("path,label\na.jpg,99999999\n", "would make 100,000,000 classes; list them with --classes"),
        ("path,label,split\na.jpg,1,../x\n", r"line 2: split '\.\./x'"),
        ("path,label,split\na.jpg,1,\n", "line 2: split ''"),
        ('path,label\n"a.jpg,1\n', "line 2: unexpected end of data"),
    ],
)
def test_errors_in_a_table_are_reported_with_file_and_line(tmp_path: Path, text: str, says: str) -> None:
    write_table(tmp_path, text)
    with pytest.raises(DataError, match=says) as caught:
        find("csv", tmp_path)
    assert str(tmp_path / "labels.csv") in str(caught.value)


def test_an_unknown_class_and_a_missing_table_are_refused(tmp_path: Path) -> None:
    write_table(tmp_path, "path,label,clean\na.jpg,cat,dog\nb.jpg,dog,bird\n")
    names = tmp_path / "names.txt"
    names.write_text("cat\ndog\n")
    with pytest.raises(DataError, match=r"labels.csv, line 3: no class 'bird'"):
        find("csv", tmp_path, "--classes", str(names))
    names.write_text("cat\ndog\ncat\n")
    with pytest.raises(DataError, match=r"names.txt: lists a class twice"):
        find("csv", tmp_path, "--classes", str(names))
    with pytest.raises(DataError, match=r"gone.csv: cannot be read: No such file.*--csv"):
        find("csv", tmp_path, "--csv", str(tmp_path / "gone.csv"))
