"""`sopdist labels add` and `remove`: label sets from files; nothing is lost if a command fails."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sopdist.cli import main
from sopdist.data.labels import list_labels
from sopdist.errors import DataError
from tests.support.label_sets import GIVEN, add, labels, noise, recipe
from tests.support.small_splits import samples, write_split


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_split(tmp_path / "train")
    return tmp_path / "train"


def test_a_label_set_can_be_added_from_an_array(folder: Path) -> None:
    path = folder.parent / "a.npy"
    np.save(path, np.array(GIVEN[::-1], dtype=np.uint8))
    assert main(["labels", "add", str(folder), "mine", "--from", str(path), "--source", "two annotators"]) == 0
    assert labels(folder, "mine") == GIVEN[::-1]
    assert recipe(folder, "mine")["source"] == "two annotators"
    assert recipe(folder, "mine")["file"] == "a.npy"


@pytest.mark.parametrize("name", ["list.txt", "list.csv"])
@pytest.mark.parametrize("header", ["", "label\n"])
@pytest.mark.parametrize("end", ["", "\n", "\n\n"])
def test_a_list_has_indices_or_names_and_an_optional_header(folder: Path, name: str, header: str, end: str) -> None:
    assert add(folder, name, header + "\n".join(["owl", "1", " cat ", "-1", *["2"] * 8]) + end) == 0
    assert labels(folder, "new") == [2, 1, 0, -1, *[2] * 8]


def test_samples_that_a_table_leaves_out_are_unknown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert add(folder, "t.csv", "\ufeffnote,Label,index\nx,owl,3\n\ny,0,11\n") == 0
    assert labels(folder, "new") == [-1, -1, -1, 2, *[-1] * 7, 0]
    assert "2 of 12 labels" in capsys.readouterr().out


def test_samples_that_a_table_leaves_out_are_copied_from_the_base(folder: Path) -> None:
    assert add(folder, "t.txt", "key,label\nk/7,cat\nk/0.jpg,dog\n", "--base", "given") == 0
    assert labels(folder, "new") == [1, *GIVEN[1:7], 0, *GIVEN[8:]]
    assert recipe(folder, "new")["base"] == "given"


def test_a_table_may_identify_samples_by_path(folder: Path) -> None:
    assert add(folder, "t.csv", "path,label\nk/7.jpg,cat\n") == 0
    assert labels(folder, "new") == [-1] * 7 + [0] + [-1] * 4


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("a.npy", ["--base", "given"], "--base has no effect here"),
        ("l.txt", ["--base", "given"], "--base has no effect here"),
        ("a.npy", ["--as", "names"], "--as has no effect on arrays"),
    ],
)
def test_options_without_effect_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, options: list[str], message: str
) -> None:
    content = io.BytesIO()
    np.save(content, np.zeros(12, int))
    assert add(folder, name, content.getvalue() if name == "a.npy" else "0\n" * 12, *options) == 1
    assert message in capsys.readouterr().err


def test_an_array_header_with_a_huge_shape_allocates_no_memory(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for header in (
        b"{'descr': '<i8', 'fortran_order': False, 'shape': (100000000000000,), }",
        b"{'descr': '<i8', 'fortran_order': False, 'shape': (" + b"(" * 50 + b"12,), }",
    ):
        content = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + b"\0" * 96
        assert add(folder, "a.npy", content) == 1
        assert "a.npy: not a NumPy array of numbers" in capsys.readouterr().err


@pytest.mark.parametrize("writes", [0, 1])
def test_a_full_disk_leaves_the_old_label_set_intact(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    assert add(folder, "l.txt", "0\n" * 12) == 0
    left = iter([True] * writes)

    def fsync(_: int) -> None:
        if not next(left, False):
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "fsync", fsync)
        assert add(folder, "l.txt", "1\n" * 12, "--overwrite") == 1
    assert "labels/new: cannot be written: No space left on device" in capsys.readouterr().err
    assert labels(folder, "new") == [0] * 12
    assert not list(folder.glob("labels/*.part"))


@pytest.mark.parametrize("step", range(1, 4))
def test_an_interrupted_replacement_never_leaves_an_array_with_the_wrong_description(
    folder: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """The steps: remove the old description, replace the array, write the new description."""
    assert add(folder, "l.txt", "0\n" * 12) == 0
    left = iter(range(step - 1))

    def interrupting(method: Callable[..., object]) -> Callable[..., object]:
        def act(path: Path, *args: object, **options: object) -> object:
            if "part" in path.name and method is unlink:
                return method(path, *args, **options)  # cleaning up
            if next(left, None) is None:
                raise KeyboardInterrupt
            return method(path, *args, **options)

        return act

    unlink = Path.unlink
    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", interrupting(Path.unlink))
        patched.setattr(Path, "replace", interrupting(Path.replace))
        assert add(folder, "l.txt", "1\n" * 12, "--overwrite") == 130
    if step == 1:
        assert labels(folder, "new") == [0] * 12
    else:
        with pytest.raises(DataError, match="incomplete"):
            labels(folder, "new")


def test_a_label_set_that_cannot_be_removed_is_reported(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unlink(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path), missing_ok)

    assert add(folder, "l.txt", "0\n" * 12) == 0
    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", unlink)
        assert main(["labels", "remove", str(folder), "new"]) == 1
    assert "labels/new: cannot be written: Read-only file system" in capsys.readouterr().err


def test_the_key_column_may_also_contain_paths(tmp_path: Path) -> None:
    members = samples(3)
    members[1] = members[1]._replace(key="a%2Eb/c%20d")
    members[2] = members[2]._replace(key="twin%2Ejpg")
    write_split(tmp_path / "train", members)
    assert add(tmp_path / "train", "t.csv", 'key,label\n"a.b/c d.png",2\ntwin.jpg,0\n') == 0
    assert labels(tmp_path / "train", "new") == [-1, 2, 0]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("l.txt", "1\n" * 11, "l.txt: 11 labels for 12 samples"),
        ("l.txt", "1\n" * 13, "l.txt: 13 labels for 12 samples"),
        ("l.txt", "1\n2\n3\n" * 4, "l.txt, line 3: class 3: must be from 0 to 2"),
        ("l.txt", "1\n-2\n" * 6, "l.txt, line 2: class -2"),
        ("l.txt", "1\n\n" + "1\n" * 11, "l.txt, line 2: empty"),
        ("l.txt", "1\nowll\n" * 6, "l.txt, line 2: no class 'owll'; did you mean 'owl'?"),
        ("l.txt", "1\n1.0\n" * 6, "l.txt, line 2: no class '1.0'"),
        ("l.csv", "1\n1,2\n" * 6, "l.csv, line 2: 2 columns"),
        ("l.csv", "0,1\n1,2\n" * 6, "l.csv, line 1: several columns without a known header"),
        ("t.csv", "file,class\nk/1,1\n", "found 'file', 'class', expected label and one of index, key, path"),
        ("t.txt", "file,class\nk/1,1\n", "found 'file', 'class', expected label and one of index, key, path"),
        ("t.csv", "path;label\nk/1;1\n", "t.csv, line 1: columns must be separated by commas, not by ';'"),
        ("t.txt", "path\tlabel\nk/1\t1\n", "t.txt, line 1: columns must be separated by commas, not by a tab"),
        ("t.csv", "path,label\ndata/k/7.jpg,1\n", "relative to the --root of `sopdist prepare`; did you mean 'k/7'?"),
        ("t.csv", "key,label\nK/x11,1\n", "no sample has the key 'K/x11'; keys and paths are relative to"),
        ("l.txt", "1\nOWL\n" * 6, "l.txt, line 2: no class 'OWL'; did you mean 'owl'?"),
        ("l.csv", 'index,label\n0,"cat\n', "l.csv, line"),
        ("l.csv", "", "l.csv: empty"),
        ("l.csv", "1\n\udcff", ""),
        ("t.csv", "index,label\n0,1\n12,1\n", "t.csv, line 3: index '12': must be from 0 to 11"),
        ("t.csv", "index,label\n-1,1\n", "t.csv, line 2: index '-1'"),
        ("t.csv", "index,label\none,1\n", "t.csv, line 2: index 'one'"),
        ("t.csv", "index,label\n5,1\n6,1\n5,2\n", "t.csv, line 4: duplicate index 5, already in line 2"),
        ("t.csv", "index,label\n5\n", "t.csv, line 2: 1 columns"),
        ("t.csv", "index,label\n5,\n", "t.csv, line 2: no class ''"),
        ("t.csv", "key,label\nk/1,1\nk/99,1\nk/98,0\n", "t.csv, line 3: no sample has the key 'k/99' (2 such lines)"),
        ("t.csv", "key,label\nk/1,1\nk/1.jpg,1\n", "t.csv, line 3: duplicate key k/1.jpg, already in line 2"),
        ("t.csv", "key,label\n/etc/passwd,1\n", "t.csv, line 2: no sample has the key '/etc/passwd'"),
        ("l.json", "[]", "l.json: label files must be .npy, .txt or .csv"),
        ("l.npy", "no array", "l.npy: not a NumPy array"),
        ("l.npy", "", "l.npy: not a NumPy array"),
    ],
)
def test_a_mistake_in_a_file_is_reported_with_its_line(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, content: str, message: str
) -> None:
    encoded = content.encode("utf-8", "surrogateescape")
    assert add(folder, name, encoded) == 1
    error = capsys.readouterr().err
    assert error.startswith("sopdist: ")
    assert (message or "not UTF-8") in error
    assert list_labels(folder) == ["given"]


def test_arrays_of_the_wrong_kind_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder.parent / "a.npy"
    for array, message in (
        (np.zeros(12), "float64"),
        (np.zeros((12, 1), dtype=int), "shape (12, 1)"),
        (np.zeros(11, dtype=int), "11 labels for 12 samples"),
        (np.full(12, 3), "label 3 at index 0"),
        (np.array([None] * 12), "not a NumPy array"),  # would have to be unpickled
    ):
        np.save(path, array)
        assert main(["labels", "add", str(folder), "new", "--from", str(path)]) == 1
        assert message in capsys.readouterr().err
    assert main(["labels", "add", str(folder), "new", "--from", str(path.with_name("absent.npy"))]) == 1
    assert "absent.npy: cannot be read" in capsys.readouterr().err


def test_class_names_that_are_numbers_are_ambiguous_without_as(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "train"
    write_split(folder, samples(3), classes=("2", "0", "7"))
    assert add(folder, "l.txt", "2\n0\n1\n") == 1
    assert "'2' is ambiguous: it is the index of class 2 and the name of class 0" in capsys.readouterr().err
    assert add(folder, "l.txt", "2\n0\n1\n", "--as", "numbers") == 0
    assert labels(folder, "new") == [2, 0, 1]
    assert add(folder, "l.txt", "2\n0\n-1\n", "--as", "names", "--overwrite") == 0
    assert labels(folder, "new") == [0, 1, -1]
    assert add(folder, "l.txt", "7\n7\n7\n", "--overwrite") == 0
    assert labels(folder, "new") == [2, 2, 2]


def test_a_name_shared_by_two_classes_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_split(tmp_path / "train", samples(3), classes=("crane", "dog", "crane"))
    assert add(tmp_path / "train", "l.txt", "dog\ncrane\n0\n") == 1
    assert "line 2: classes 0, 2 are all named 'crane'" in capsys.readouterr().err


def test_nothing_is_overwritten_without_overwrite(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert add(folder, "l.txt", "0\n" * 12) == 0
    assert add(folder, "l.txt", "0\n" * 12) == 0
    assert "already exists, with the same labels" in capsys.readouterr().out
    assert add(folder, "l.txt", "1\n" * 12) == 1
    assert "--overwrite" in capsys.readouterr().err
    assert labels(folder, "new") == [0] * 12
    assert add(folder, "l.txt", "1\n" * 12, "--overwrite") == 0
    assert labels(folder, "new") == [1] * 12
    (folder / "labels" / "new.json").unlink()
    assert add(folder, "l.txt", "1\n" * 12) == 1
    assert "incomplete or damaged" in capsys.readouterr().err
    assert add(folder, "l.txt", "1\n" * 12, "--overwrite") == 0


def test_given_cannot_be_changed_or_removed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder.parent / "l.txt").write_text("0\n" * 12)
    for command in (
        ["add", str(folder), "given", "--from", str(folder.parent / "l.txt"), "--overwrite"],
        ["noise", str(folder), "symmetric", "--rate", "1", "--name", "given", "--overwrite"],
        ["remove", str(folder), "given"],
    ):
        assert main(["labels", *command]) == 1
        assert "'given' holds the labels that came with the data set" in capsys.readouterr().err
    assert labels(folder, "given") == GIVEN


def test_a_label_set_name_must_not_be_a_path(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert noise(folder, "symmetric", "--rate", "1", "--name", "../x") == 1
    assert main(["labels", "remove", str(folder), "../manifest"]) == 1
    assert "no label set '../manifest'" in capsys.readouterr().err
    assert main(["labels", "list", str(folder)]) == 0


def test_remove_deletes_both_files_of_a_label_set(folder: Path) -> None:
    assert add(folder, "l.txt", "0\n" * 12) == 0
    assert main(["labels", "remove", str(folder), "new"]) == 0
    assert sorted(path.name for path in (folder / "labels").iterdir()) == ["given.json", "given.npy"]
