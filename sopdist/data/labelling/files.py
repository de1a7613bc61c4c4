"""Label files of users: a NumPy array, a list with one label per line, or a table with a header. Also lists of sample
indices and transition matrices.

Mistakes in such a file are reported with their line number, before they can spoil a training run.
"""

from __future__ import annotations

import csv
import difflib
import io
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from ..keys import key_of
from ..labels import UNKNOWN, Labels, check_labels, read_array
from ..manifest import Manifest
from ..shards import Shard
from .noise import check_matrix

NUMBERS, NAMES = "numbers", "names"
TEXT_SUFFIXES = (".txt", ".csv")
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
_LABEL = "label"
_SAMPLE_COLUMNS = ("index", "key", "path")  # columns that identify a sample; the first one present is used
_COLUMNS = f"{_LABEL} and one of {', '.join(_SAMPLE_COLUMNS)}"
_OTHER_SEPARATORS = {";": "';'", "\t": "a tab"}
_MAX_COMPARED = 20_000  # keys compared to suggest the closest one: more would take too long

Row = tuple[int, list[str]]  # line number, from 1, and cells


class LabelFile(NamedTuple):
    """Content of a label file."""

    labels: Labels  # (N,)
    named: int  # number of samples in the file; the others are copied from the base, or unknown


class ClassReader:
    """Parses classes that are written as indices or as names; raises DataError if a text could be either."""

    def __init__(self, classes: Sequence[str], written_as: str | None = None) -> None:
        self._classes = classes
        self._written_as = written_as
        self._by_name: dict[str, list[int]] = {}
        for label, name in enumerate(classes):
            self._by_name.setdefault(name, []).append(label)
        self._parsed: dict[str, int] = {}

    def is_name(self, text: str) -> bool:
        """Whether a class has this name."""
        return text in self._by_name

    def parse(self, text: str, where: str, *, unknown: bool = False) -> int:
        """The class index that `text` means; `unknown` allows -1. Error messages start with `where`."""
        found = self._parsed.get(text)
        if found is None:
            found = self._parsed[text] = self._interpret(text, where)
        if found == UNKNOWN and not unknown:
            raise DataError(f"{where}: {text!r} is not a class; must be from 0 to {len(self._classes) - 1}")
        return found

    def _interpret(self, text: str, where: str) -> int:
        named = self._by_name.get(text, []) if self._written_as != NUMBERS else []
        label = int(text) if self._written_as != NAMES and _INTEGER.fullmatch(text) else None
        if label is not None and not UNKNOWN <= label < len(self._classes):
            if not named:
                raise DataError(
                    f"{where}: class {label}: must be from 0 to {len(self._classes) - 1}, or -1 for unknown"
                )
            label = None
        if label is not None and named not in ([], [label]):
            raise DataError(
                f"{where}: {text!r} is ambiguous: it is the index of class {label} and the name of class {named[0]}; "
                f"choose one with --as {NUMBERS} or --as {NAMES}"
            )
        if label is not None:
            return label
        if len(named) > 1:
            raise DataError(f"{where}: classes {', '.join(map(str, named))} are all named {text!r}; use the index")
        if named:
            return named[0]
        if self._written_as == NAMES and text == str(UNKNOWN):
            return UNKNOWN
        raise DataError(f"{where}: no class {text!r}{_did_you_mean(text, self._classes)}")


def read_label_file(
    path: Path, folder: Path, manifest: Manifest, base: Labels | None = None, written_as: str | None = None
) -> LabelFile:
    """Read labels for the split in `folder`. Samples that are not in the file are copied from `base`, or unknown."""
    if path.suffix == ".npy":
        if written_as is not None:
            raise DataError(f"{path}: --as has no effect on arrays, which contain numbers; leave it out")
        _refuse_base(path, base)
        labels = check_labels(_load_npy(path), manifest, str(path))
        return LabelFile(labels, len(labels))
    if path.suffix not in TEXT_SUFFIXES:
        raise DataError(f"{path}: label files must be .npy, {' or '.join(TEXT_SUFFIXES)} files")
    reader = ClassReader(manifest.classes, written_as)
    rows = _rows(path)
    first = next(rows, None)
    if first is None:
        raise DataError(f"{path}: empty")
    header = _header(first[1])
    if header:
        return _read_table(path, folder, header, rows, manifest, reader, base)
    _refuse_unknown_columns(path, first, reader)
    _refuse_base(path, base)
    if first[1] == [_LABEL] and not reader.is_name(_LABEL):
        return _read_list(path, rows, manifest, reader)
    return _read_list(path, itertools.chain([first], rows), manifest, reader)


def read_indices(path: Path, samples: int) -> NDArray[np.int64]:
    """Read sample indices from a file, in its order: .npy, or text with one index per line."""
    if path.suffix != ".npy":
        lines = enumerate(_text(path).split("\n"), start=1)
        return np.array([_index(line.strip(), samples, path, number) for number, line in lines if line.strip()], int)
    array = _load_npy(path)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise DataError(f"{path}: {array.dtype} of shape {array.shape}, expected a list of integers")
    wrong = np.flatnonzero((array < 0) | (array >= samples))
    if len(wrong):
        raise DataError(f"{path}: index {array[wrong[0]]} at position {wrong[0]}: must be from 0 to {samples - 1}")
    return array.astype(np.int64)


def read_matrix(path: Path, classes: int) -> NDArray[np.float64]:
    """Read a transition matrix: .npy, or text with one row per line, separated by whitespace or commas."""
    if path.suffix == ".npy":
        return check_matrix(_load_npy(path), classes, str(path))
    if path.suffix not in TEXT_SUFFIXES:
        raise DataError(f"{path}: a matrix must be a .npy, {' or '.join(TEXT_SUFFIXES)} file")
    matrix = []
    for line_number, line in enumerate(_text(path).split("\n"), start=1):
        cells = line.replace(",", " ").split()
        if not cells:
            continue
        try:
            matrix.append([float(cell) for cell in cells])
        except ValueError as error:
            raise DataError(f"{path}, line {line_number}: {error}") from None
        if len(cells) != classes:
            raise DataError(
                f"{path}, line {line_number}: {len(cells)} numbers, expected one for each of the {classes} classes"
            )
    return check_matrix(np.array(matrix), classes, str(path))


def _read_list(path: Path, rows: Iterable[Row], manifest: Manifest, reader: ClassReader) -> LabelFile:
    """One label per line, in index order."""
    labels = np.empty(manifest.samples, dtype=np.int32)
    count = blank = 0
    for line_number, cells in rows:
        where = f"{path}, line {line_number}"
        if not any(cells):
            blank = blank or line_number
            continue
        if blank:  # not at the end: all later labels would belong to other samples
            raise DataError(f"{path}, line {blank}: empty; every line must have a label ({UNKNOWN} for unknown)")
        if len(cells) > 1:
            raise DataError(f"{where}: {len(cells)} columns, expected one; quote names that contain commas")
        if count < len(labels):
            labels[count] = reader.parse(cells[0], where, unknown=True)
        count += 1
    if count != len(labels):
        raise DataError(
            f"{path}: {count} labels for {len(labels)} samples; to label only some, use a table with the columns "
            "index,label or path,label"
        )
    return LabelFile(labels, count)


def _read_table(
    path: Path, folder: Path, header: dict[str, int], rows: Iterable[Row], manifest: Manifest, reader: ClassReader,
    base: Labels | None,
) -> LabelFile:  # fmt: skip
    """A table with columns label and index, key or path, in any order; samples may be missing."""
    by = next(name for name in _SAMPLE_COLUMNS if name in header)
    names: list[str] = []
    given: list[int] = []
    lines: list[int] = []
    for line_number, cells in rows:
        if not any(cells):
            continue
        if len(cells) <= max(header.values()):
            raise DataError(f"{path}, line {line_number}: {len(cells)} columns, fewer than the header")
        names.append(cells[header[by]])
        given.append(reader.parse(cells[header[_LABEL]], f"{path}, line {line_number}", unknown=True))
        lines.append(line_number)
    if by == "index":
        indices = [_index(name, manifest.samples, path, line) for name, line in zip(names, lines, strict=True)]
    else:
        indices = _indices_of_keys(path, folder, manifest, by, names, lines)
    labels = np.full(manifest.samples, UNKNOWN, dtype=np.int32) if base is None else base.copy()
    line_of = np.zeros(manifest.samples, dtype=np.int64)  # line that labelled the sample
    for index, label, name, line in zip(indices, given, names, lines, strict=True):
        if line_of[index]:
            raise DataError(f"{path}, line {line}: duplicate {by} {name}, already in line {line_of[index]}")
        labels[index], line_of[index] = label, line
    return LabelFile(labels, len(indices))


def _index(text: str, samples: int, path: Path, line: int) -> int:
    index = int(text) if _INTEGER.fullmatch(text) else -1
    if not 0 <= index < samples:
        raise DataError(f"{path}, line {line}: index {text!r}: must be from 0 to {samples - 1}")
    return index


def _indices_of_keys(
    path: Path, folder: Path, manifest: Manifest, by: str, names: Sequence[str], lines: Sequence[int]
) -> list[int]:
    """Indices of the samples with these keys. Only the keys in the file are kept in memory, not those of the split."""
    rows_of: dict[str, list[int]] = {}
    for row, name in enumerate(names):
        for key in _possible_keys(name):
            rows_of.setdefault(key, []).append(row)
    indices = [-1] * len(names)
    for info in manifest.shards:
        for position, key in enumerate(Shard(folder, info).index.keys):
            for row in rows_of.get(key, ()):
                indices[row] = info.first + position
    missing = [row for row, index in enumerate(indices) if index < 0]
    if missing:
        row = missing[0]
        more = f" ({len(missing)} such lines)" if len(missing) > 1 else ""
        raise DataError(
            f"{path}, line {lines[row]}: no sample has the {by} {names[row]!r}{more}; keys and paths "
            f"are relative to the --root of `sopdist prepare`{_suggest_key(folder, manifest, names[row])}"
        )
    return indices


def _suggest_key(folder: Path, manifest: Manifest, name: str) -> str:
    """End of an error message: the closest key. Usually the folder is wrong, so the same file name is tried first."""
    last_parts = {key.rpartition("/")[2] for key in _possible_keys(name.rstrip("/").rpartition("/")[2])}
    some: list[str] = []
    for info in manifest.shards:
        for key in Shard(folder, info).index.keys:
            if key.rpartition("/")[2] in last_parts:
                return f"; did you mean {key!r}?"
            if len(some) < _MAX_COMPARED:
                some.append(key)
    return _did_you_mean(name, some)


def _possible_keys(name: str) -> set[str]:
    """Keys that `name` may stand for: `name` is a key in the shards, or a path in the source."""
    try:
        return {name, key_of(name), key_of(name, keep_extension=True)}
    except DataError:
        return {name}


def _did_you_mean(text: str, names: Sequence[str]) -> str:
    """End of an error message: the closest name, ignoring case; empty if none is close."""
    folded: dict[str, str] = {}
    for name in names:
        folded.setdefault(name.casefold(), name)
    close = difflib.get_close_matches(text.casefold(), folded, n=1)
    return f"; did you mean {folded[close[0]]!r}?" if close else ""


def _header(cells: Sequence[str]) -> dict[str, int]:
    """Column number of each known column; empty if this is not a header."""
    known = (_LABEL, *_SAMPLE_COLUMNS)
    columns = {cell.lower(): column for column, cell in enumerate(cells) if cell.lower() in known}
    return columns if _LABEL in columns and len(columns) > 1 else {}


def _refuse_unknown_columns(path: Path, first: Row, reader: ClassReader) -> None:
    """Refuse a first line without a known header that looks like a table."""
    line, cells = first
    where = f"{path}, line {line}"
    if len(cells) == 1 and "," in cells[0] and not reader.is_name(cells[0]):  # a .txt
        cells = [cell.strip() for cell in cells[0].split(",")]
    if len(cells) > 1:
        raise DataError(
            f"{where}: several columns without a known header; found {', '.join(map(repr, cells[:5]))}, "
            f"expected {_COLUMNS}"
        )
    for separator, name in _OTHER_SEPARATORS.items():
        if separator in cells[0] and not reader.is_name(cells[0]):
            raise DataError(f"{where}: columns must be separated by commas, not by {name}: {cells[0]!r:.80}")


def _refuse_base(path: Path, base: Labels | None) -> None:
    if base is not None:
        raise DataError(f"{path}: --base has no effect here, because only a table may leave samples out; omit --base")


def _rows(path: Path) -> Iterator[Row]:
    """Rows of a .txt or .csv file, with stripped cells. In a .txt without a table header, a line is one cell."""
    text = _text(path)
    first = text.partition("\n")[0]
    if path.suffix == ".txt" and not _header([cell.strip() for cell in first.split(",")]):
        for line_number, line in enumerate(text.removesuffix("\n").split("\n"), start=1):
            yield line_number, [line.strip()]
        return
    reader = csv.reader(io.StringIO(text), strict=True)
    try:
        for cells in reader:
            yield reader.line_num, [cell.strip() for cell in cells]
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: {error}") from None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # spreadsheets write a byte order mark
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None


def _load_npy(path: Path) -> NDArray[Any]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    if content.startswith(b"PK"):
        raise DataError(f"{path}: contains several arrays, expected one; use numpy.save")
    return read_array(content, str(path))
