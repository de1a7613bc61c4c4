"""`sopdist labels`: sets from files, noise, lists and comparisons, as a person runs them."""

from __future__ import annotations

import csv
import errno
import io
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sopdist.cli import main
from sopdist.data.errors import DataError
from sopdist.data.labelling.diff import compare_labels, diff_text
from sopdist.data.labels import list_labels, read_labels, write_labels
from sopdist.data.manifest import read_manifest
from tests.data.small_splits import sample, samples, write_split

GIVEN = [index % 3 for index in range(12)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_split(tmp_path / "train")
    return tmp_path / "train"


def labels(folder: Path, name: str) -> list[int]:
    return read_labels(folder, read_manifest(folder), name).labels.tolist()


def recipe(folder: Path, name: str) -> dict[str, object]:
    return read_labels(folder, read_manifest(folder), name).recipe


def add(folder: Path, name: str, content: str | bytes, *options: str) -> int:
    """`sopdist labels add` from a file of that name with that content."""
    path = folder.parent / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return main(["labels", "add", str(folder), "new", "--from", str(path), *options])


def noise(folder: Path, *options: str) -> int:
    return main(["labels", "noise", str(folder), *options])


# Files


def test_an_array_becomes_a_label_set(folder: Path) -> None:
    path = folder.parent / "a.npy"
    np.save(path, np.array(GIVEN[::-1], dtype=np.uint8))
    assert main(["labels", "add", str(folder), "mine", "--from", str(path), "--source", "two people"]) == 0
    assert labels(folder, "mine") == GIVEN[::-1]
    assert recipe(folder, "mine")["source"] == "two people"
    assert recipe(folder, "mine")["file"] == "a.npy"


@pytest.mark.parametrize("name", ["list.txt", "list.csv"])
@pytest.mark.parametrize("header", ["", "label\n"])
@pytest.mark.parametrize("end", ["", "\n", "\n\n"])
def test_a_list_has_numbers_or_names_and_perhaps_a_header(folder: Path, name: str, header: str, end: str) -> None:
    assert add(folder, name, header + "\n".join(["owl", "1", " cat ", "-1", *["2"] * 8]) + end) == 0
    assert labels(folder, "new") == [2, 1, 0, -1, *[2] * 8]


def test_a_table_by_index_leaves_the_rest_unknown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert add(folder, "t.csv", "\ufeffnote,Label,index\nx,owl,3\n\ny,0,11\n") == 0
    assert labels(folder, "new") == [-1, -1, -1, 2, *[-1] * 7, 0]
    assert "2 of 12 labels" in capsys.readouterr().out


def test_a_table_by_key_on_a_base(folder: Path) -> None:
    assert add(folder, "t.txt", "key,label\nk/7,cat\nk/0.jpg,dog\n", "--base", "given") == 0
    assert labels(folder, "new") == [1, *GIVEN[1:7], 0, *GIVEN[8:]]
    assert recipe(folder, "new")["base"] == "given"


def test_a_table_by_path(folder: Path) -> None:
    assert add(folder, "t.csv", "path,label\nk/7.jpg,cat\n") == 0
    assert labels(folder, "new") == [-1] * 7 + [0] + [-1] * 4


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("a.npy", ["--base", "given"], "--base is of no use here"),
        ("l.txt", ["--base", "given"], "--base is of no use here"),
        ("a.npy", ["--as", "names"], "--as is of no use here"),
    ],
)
def test_options_that_would_do_nothing_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, options: list[str], message: str
) -> None:
    content = io.BytesIO()
    np.save(content, np.zeros(12, int))
    assert add(folder, name, content.getvalue() if name == "a.npy" else "0\n" * 12, *options) == 1
    assert message in capsys.readouterr().err


def test_a_header_that_claims_too_much_costs_no_memory(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for header in (
        b"{'descr': '<i8', 'fortran_order': False, 'shape': (100000000000000,), }",
        b"{'descr': '<i8', 'fortran_order': False, 'shape': (" + b"(" * 50 + b"12,), }",
    ):
        content = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + b"\0" * 96
        assert add(folder, "a.npy", content) == 1
        assert "a.npy: not a NumPy array of numbers" in capsys.readouterr().err


@pytest.mark.parametrize("writes", [0, 1])
def test_a_full_disk_costs_nothing(
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
def test_an_interrupted_replacement_is_never_explained_by_another_description(
    folder: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """The steps: the old description goes, the array comes, the new description comes."""
    assert add(folder, "l.txt", "0\n" * 12) == 0
    left = iter(range(step - 1))

    def interrupting(method: Callable[..., object]) -> Callable[..., object]:
        def act(path: Path, *args: object, **options: object) -> object:
            if "part" in path.name and method is unlink:
                return method(path, *args, **options)  # tidying up
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


def test_a_set_that_cannot_be_removed_is_told_of(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unlink(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path), missing_ok)

    assert add(folder, "l.txt", "0\n" * 12) == 0
    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", unlink)
        assert main(["labels", "remove", str(folder), "new"]) == 1
    assert "labels/new: cannot be written: Read-only file system" in capsys.readouterr().err


def test_a_key_is_also_found_by_its_path(tmp_path: Path) -> None:
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
        ("l.txt", "1\n2\n3\n" * 4, "l.txt, line 3: class 3: allowed are 0 to 2"),
        ("l.txt", "1\n-2\n" * 6, "l.txt, line 2: class -2"),
        ("l.txt", "1\n\n" + "1\n" * 11, "l.txt, line 2: empty"),
        ("l.txt", "1\nowll\n" * 6, "l.txt, line 2: no class 'owll'; did you mean 'owl'?"),
        ("l.txt", "1\n1.0\n" * 6, "l.txt, line 2: no class '1.0'"),
        ("l.csv", "1\n1,2\n" * 6, "l.csv, line 2: 2 columns"),
        ("l.csv", "0,1\n1,2\n" * 6, "l.csv, line 1: several columns and no header"),
        ("t.csv", "file,class\nk/1,1\n", "it has 'file', 'class', needed are label and one of index, key, path"),
        ("t.txt", "file,class\nk/1,1\n", "it has 'file', 'class', needed are label and one of index, key, path"),
        ("t.csv", "path;label\nk/1;1\n", "t.csv, line 1: columns must be separated by commas, not by ';'"),
        ("t.txt", "path\tlabel\nk/1\t1\n", "t.txt, line 1: columns must be separated by commas, not by a tab"),
        ("t.csv", "path,label\ndata/k/7.jpg,1\n", "relative to the --root of `sopdist prepare`; did you mean 'k/7'?"),
        ("t.csv", "key,label\nK/x11,1\n", "no sample has the key 'K/x11'; keys and paths are relative to"),
        ("l.txt", "1\nOWL\n" * 6, "l.txt, line 2: no class 'OWL'; did you mean 'owl'?"),
        ("l.csv", 'index,label\n0,"cat\n', "l.csv, line"),
        ("l.csv", "", "l.csv: empty"),
        ("l.csv", "1\n\udcff", ""),
        ("t.csv", "index,label\n0,1\n12,1\n", "t.csv, line 3: index '12': samples are 0 to 11"),
        ("t.csv", "index,label\n-1,1\n", "t.csv, line 2: index '-1'"),
        ("t.csv", "index,label\none,1\n", "t.csv, line 2: index 'one'"),
        ("t.csv", "index,label\n5,1\n6,1\n5,2\n", "t.csv, line 4: index 5 again, it is in line 2"),
        ("t.csv", "index,label\n5\n", "t.csv, line 2: 1 columns"),
        ("t.csv", "index,label\n5,\n", "t.csv, line 2: no class ''"),
        ("t.csv", "key,label\nk/1,1\nk/99,1\nk/98,0\n", "t.csv, line 3: no sample has the key 'k/99' (2 such lines)"),
        ("t.csv", "key,label\nk/1,1\nk/1.jpg,1\n", "t.csv, line 3: key k/1.jpg again, it is in line 2"),
        ("t.csv", "key,label\n/etc/passwd,1\n", "t.csv, line 2: no sample has the key '/etc/passwd'"),
        ("l.json", "[]", "l.json: labels are read from .npy, .txt or .csv"),
        ("l.npy", "no array", "l.npy: not a NumPy array"),
        ("l.npy", "", "l.npy: not a NumPy array"),
    ],
)
def test_a_mistake_in_a_file_is_named_with_its_line(
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
        (np.array([None] * 12), "not a NumPy array"),  # would need unpickling
    ):
        np.save(path, array)
        assert main(["labels", "add", str(folder), "new", "--from", str(path)]) == 1
        assert message in capsys.readouterr().err
    assert main(["labels", "add", str(folder), "new", "--from", str(path.with_name("absent.npy"))]) == 1
    assert "absent.npy: cannot be read" in capsys.readouterr().err


def test_names_that_are_numbers_must_be_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "train"
    write_split(folder, samples(3), classes=("2", "0", "7"))
    assert add(folder, "l.txt", "2\n0\n1\n") == 1
    assert "'2' is ambiguous, class number 2 or the class named so, which is number 0" in capsys.readouterr().err
    assert add(folder, "l.txt", "2\n0\n1\n", "--as", "numbers") == 0
    assert labels(folder, "new") == [2, 0, 1]
    assert add(folder, "l.txt", "2\n0\n-1\n", "--as", "names", "--overwrite") == 0
    assert labels(folder, "new") == [0, 1, -1]
    assert add(folder, "l.txt", "7\n7\n7\n", "--overwrite") == 0
    assert labels(folder, "new") == [2, 2, 2]


def test_a_name_of_two_classes_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_split(tmp_path / "train", samples(3), classes=("crane", "dog", "crane"))
    assert add(tmp_path / "train", "l.txt", "dog\ncrane\n0\n") == 1
    assert "line 2: classes 0, 2 are all named 'crane'" in capsys.readouterr().err


def test_nothing_is_overwritten_unasked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert add(folder, "l.txt", "0\n" * 12) == 0
    assert add(folder, "l.txt", "0\n" * 12) == 0
    assert "is there already, with the same labels" in capsys.readouterr().out
    assert add(folder, "l.txt", "1\n" * 12) == 1
    assert "--overwrite" in capsys.readouterr().err
    assert labels(folder, "new") == [0] * 12
    assert add(folder, "l.txt", "1\n" * 12, "--overwrite") == 0
    assert labels(folder, "new") == [1] * 12
    (folder / "labels" / "new.json").unlink()
    assert add(folder, "l.txt", "1\n" * 12) == 1
    assert "incomplete or damaged" in capsys.readouterr().err
    assert add(folder, "l.txt", "1\n" * 12, "--overwrite") == 0


def test_given_stays_as_it_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder.parent / "l.txt").write_text("0\n" * 12)
    for command in (
        ["add", str(folder), "given", "--from", str(folder.parent / "l.txt"), "--overwrite"],
        ["noise", str(folder), "symmetric", "--rate", "1", "--name", "given", "--overwrite"],
        ["remove", str(folder), "given"],
    ):
        assert main(["labels", *command]) == 1
        assert "'given' is what the data set came with" in capsys.readouterr().err
    assert labels(folder, "given") == GIVEN


def test_a_name_is_no_path(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert noise(folder, "symmetric", "--rate", "1", "--name", "../x") == 1
    assert main(["labels", "remove", str(folder), "../manifest"]) == 1
    assert "no label set '../manifest'" in capsys.readouterr().err
    assert main(["labels", "list", str(folder)]) == 0


def test_remove(folder: Path) -> None:
    assert add(folder, "l.txt", "0\n" * 12) == 0
    assert main(["labels", "remove", str(folder), "new"]) == 0
    assert sorted(path.name for path in (folder / "labels").iterdir()) == ["given.json", "given.npy"]


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
    assert "is there already" in capsys.readouterr().out


def test_noise_starts_from_clean_where_there_is_one(folder: Path) -> None:
    write_labels(folder, read_manifest(folder), "clean", np.zeros(12, dtype=int), {})
    assert noise(folder, "exclusive", "--rate", "0") == 0
    assert labels(folder, "excl-0-seed0") == [0] * 12
    assert noise(folder, "exclusive", "--rate", "1", "--from", "given", "--name", "mine") == 0
    assert (np.array(labels(folder, "mine")) != GIVEN).all()


def test_pairs_by_number_name_and_preset(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert noise(folder, "pair", "--rate", "1", "--pairs", "cat:owl, 1:0") == 0
    assert labels(folder, "pair-1-seed0") == [2, 0, 2] * 4
    assert "0 cat -> 2 owl, 1 dog -> 0 cat" in capsys.readouterr().out
    assert recipe(folder, "pair-1-seed0")["pairs"] == [[0, 2], [1, 0]]
    assert noise(folder, "asymmetric", "--rate", "1", "--preset", "next", "--name", "next") == 0
    assert labels(folder, "next") == [1, 2, 0] * 4


@pytest.mark.parametrize("name", ["swap.csv", "swap.txt", "swap.npy"])
def test_a_matrix_from_a_file(folder: Path, name: str) -> None:
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
        (["pair", "--rate", "1", "--pairs", "cat:3"], "class 3: allowed are 0 to 2"),
        (["pair", "--rate", "1", "--pairs=-1:2"], "'-1' is not a class"),
        (["pair", "--rate", "1", "--pairs", "0:1,cat:2"], "class cat has a pair already"),
        (["pair", "--rate", "1", "--pairs", "0:0"], "a class that becomes itself"),
        (["pair", "--rate", "1", "--preset", "cifar10"], "made for 10 classes, the split has 3"),
        (["symmetric", "--rate", "1", "--from", "truth"], "no label set 'truth'; there is: given"),
        (["matrix", "--matrix", "absent.npy"], "absent.npy: cannot be read"),
        (["matrix", "--matrix", "absent.json"], "a matrix is read from .npy"),
    ],
)
def test_noise_that_cannot_be_drawn_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert noise(folder, *options) == 1
    assert message in capsys.readouterr().err
    assert list_labels(folder) == ["given"]


def test_a_matrix_whose_file_name_is_no_name_needs_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(folder.parent / "my matrix.npy", np.eye(3))
    options = ["matrix", "--matrix", str(folder.parent / "my matrix.npy")]
    assert noise(folder, *options) == 1
    assert "--name gives it another" in capsys.readouterr().err
    assert noise(folder, *options, "--name", "mine") == 0


def test_one_class_has_no_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_split(tmp_path, [sample(0, record={"label": 0})], classes=("cat",))
    assert noise(tmp_path, "pair", "--rate", "1", "--preset", "next") == 1
    assert "needs at least two classes" in capsys.readouterr().err


def test_a_bad_line_of_a_matrix_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder.parent / "m.txt"
    for content, message in (
        ("1 0 0\n0 1\n0 0 1\n", "m.txt, line 2: 2 numbers"),
        ("1 0 0\n0 one 0\n0 0 1\n", "m.txt, line 2: could not convert"),
        ("1 0 0\n0 1 0\n", "shape (2, 3), expected 3 x 3"),
        ("1 0 0\n0 1 0\n0 0.5 0.6\n", "row 2 (from 0) has the sum 1.1"),
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
        (["symmetric", "--rate", "1", "--seed", "-3"], "'-3' is not a whole number"),
        (["symmetric", "--rate", "1", "--preset", "next"], "--preset does not go with symmetric noise"),
        (["matrix", "--rate", "1", "--matrix", "m.npy"], "--rate does not go with matrix noise"),
        (["matrix"], "matrix noise needs --matrix"),
        (["asymmetric", "--rate", "1"], "asymmetric noise needs --pairs or --preset"),
        (["pair", "--rate", "1", "--pairs", "0:1", "--preset", "next"], "pair noise needs --pairs or --preset"),
        (["salt"], "invalid choice"),
        (["symetric"], "did you mean 'symmetric'?"),
        (["symmetric", "--rat", "1"], "unrecognized arguments: --rat"),
    ],
)
def test_options_that_do_not_fit_are_told_of(
    folder: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        noise(folder, *options)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


# Lists and comparisons


def test_the_list_counts_what_is_wrong(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = read_manifest(folder)
    assert main(["labels", "list", str(folder)]) == 0
    assert "wrong: not known" in capsys.readouterr().out
    clean = np.array([0, 1, 2, 0, 0, 0, -1, -1, -1, -1, -1, -1])
    write_labels(folder, manifest, "clean", clean, {"kind": "people", "note": "x" * 100})
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


def test_a_comparison_of_few_classes_is_a_matrix(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_a_comparison_of_many_classes_names_the_heaviest_transitions() -> None:
    draw = np.random.default_rng(0)
    before = draw.integers(0, 100, 5000).astype(np.int32)
    after = np.where(before == 7, 8, before).astype(np.int32)
    after[:40] = (before[:40] + 1) % 100
    text = diff_text(compare_labels(before, after, 100), ("a", "b"), [f"class-{k}" for k in range(100)])
    (heaviest,) = [line for line in text.splitlines() if "8 class-8" in line and "7 class-7" in line]
    assert heaviest.split()[-1] == str(int(((before == 7) & (after == 8)).sum()))
    assert "most frequent transitions (20 of" in text
    assert len(text.splitlines()) < 50


def test_equal_sets_and_sets_without_overlap_compare() -> None:
    same = np.arange(30, dtype=np.int32)
    names = [str(k) for k in range(30)]
    assert "no label differs" in diff_text(compare_labels(same, same, 30), ("a", "b"), names)
    nothing = np.full(30, -1, dtype=np.int32)
    assert "0 of 0 labels differ" in diff_text(compare_labels(same, nothing, 30), ("a", "b"), names)


def test_a_file_that_cannot_be_written_is_told_of(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["labels", "diff", str(folder), "given", "given", "--csv", str(folder / "no" / "d.csv")]) == 1
    assert "d.csv: cannot be written" in capsys.readouterr().err


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, says in (
        (["labels", "--help"], "sym-0.4-seed0"),
        (["labels", "add", "--help"], "header line"),
        (["labels", "noise", "--help"], "truck -> automobile"),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert says in capsys.readouterr().out
