"""Labels from files that people have: a NumPy array, a list with a label a line, or a table with a header. And lists of
samples, a matrix of probabilities.

A mistake in such a file is found here, with its line, and not as a strange accuracy after a night of training.
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

from ..errors import DataError
from ..keys import key_of
from ..labels import UNKNOWN, Labels, check_labels, read_array
from ..manifest import Manifest
from ..shards import Shard
from .noise import check_matrix

NUMBERS, NAMES = "numbers", "names"
TEXT_SUFFIXES = (".txt", ".csv")
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
_LABEL = "label"
_NAMES_OF_SAMPLES = ("index", "key", "path")  # columns that say which sample; the first that is there is used
_COLUMNS = f"{_LABEL} and one of {', '.join(_NAMES_OF_SAMPLES)}"
_OTHER_SEPARATORS = {";": "';'", "\t": "a tab"}
_MOST_COMPARED = 20_000  # keys, to find the nearest to one that is not there: more would take long

Row = tuple[int, list[str]]  # number of the line, from 1, and its cells


class LabelFile(NamedTuple):
    """What a file said."""

    labels: Labels  # (N,)
    named: int  # samples that the file names; all others are as in the base, or unknown


class ClassReader:
    """Reads classes that are written as numbers or as names; raises if the same text could be either."""

    def __init__(self, classes: Sequence[str], written_as: str | None = None) -> None:
        self._classes = classes
        self._written_as = written_as
        self._places: dict[str, list[int]] = {}
        for number, name in enumerate(classes):
            self._places.setdefault(name, []).append(number)
        self._read: dict[str, int] = {}

    def is_name(self, text: str) -> bool:
        """Is there a class of this name?"""
        return text in self._places

    def number(self, text: str, where: str, *, unknown: bool = False) -> int:
        """The class that `text` means; `unknown` allows -1. `where` begins the message of an error."""
        found = self._read.get(text)
        if found is None:
            found = self._read[text] = self._interpret(text, where)
        if found == UNKNOWN and not unknown:
            raise DataError(f"{where}: {text!r} is not a class; allowed are 0 to {len(self._classes) - 1}")
        return found

    def _interpret(self, text: str, where: str) -> int:
        places = self._places.get(text, []) if self._written_as != NUMBERS else []
        number = int(text) if self._written_as != NAMES and _INTEGER.fullmatch(text) else None
        if number is not None and not UNKNOWN <= number < len(self._classes):
            if not places:
                raise DataError(f"{where}: class {number}: allowed are 0 to {len(self._classes) - 1}, -1 for unknown")
            number = None
        if number is not None and places not in ([], [number]):
            raise DataError(
                f"{where}: {text!r} is ambiguous, class number {number} or the class named so, which is number "
                f"{places[0]}; say which with --as {NUMBERS} or --as {NAMES}"
            )
        if number is not None:
            return number
        if len(places) > 1:
            raise DataError(f"{where}: classes {', '.join(map(str, places))} are all named {text!r}; give the number")
        if places:
            return places[0]
        if self._written_as == NAMES and text == str(UNKNOWN):
            return UNKNOWN
        raise DataError(f"{where}: no class {text!r}{_did_you_mean(text, self._classes)}")


def read_label_file(
    path: Path, folder: Path, manifest: Manifest, base: Labels | None = None, written_as: str | None = None
) -> LabelFile:
    """Read labels for the split in `folder`. Samples that the file does not name are as in `base`, or unknown."""
    if path.suffix == ".npy":
        if written_as is not None:
            raise DataError(f"{path}: --as is of no use here: an array holds numbers; leave it out")
        _refuse_base(path, base)
        labels = check_labels(_load_npy(path), manifest, str(path))
        return LabelFile(labels, len(labels))
    if path.suffix not in TEXT_SUFFIXES:
        raise DataError(f"{path}: labels are read from .npy, {' or '.join(TEXT_SUFFIXES)} files")
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
    """Samples in the order of a file: .npy, or text with an index a line."""
    if path.suffix != ".npy":
        lines = enumerate(_text(path).split("\n"), start=1)
        return np.array([_index(line.strip(), samples, path, number) for number, line in lines if line.strip()], int)
    array = _load_npy(path)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise DataError(f"{path}: {array.dtype} of shape {array.shape}, expected a list of integers")
    wrong = np.flatnonzero((array < 0) | (array >= samples))
    if len(wrong):
        raise DataError(f"{path}: index {array[wrong[0]]}, at place {wrong[0]}: samples are 0 to {samples - 1}")
    return array.astype(np.int64)


def read_matrix(path: Path, classes: int) -> NDArray[np.float64]:
    """A transition matrix: .npy, or text with a row a line, its numbers separated by blanks or commas."""
    if path.suffix == ".npy":
        return check_matrix(_load_npy(path), classes, str(path))
    if path.suffix not in TEXT_SUFFIXES:
        raise DataError(f"{path}: a matrix is read from .npy, {' or '.join(TEXT_SUFFIXES)} files")
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
                f"{path}, line {line_number}: {len(cells)} numbers, expected one for each of {classes} classes"
            )
    return check_matrix(np.array(matrix), classes, str(path))


def _read_list(path: Path, rows: Iterable[Row], manifest: Manifest, reader: ClassReader) -> LabelFile:
    """A label a line, in index order."""
    labels = np.empty(manifest.samples, dtype=np.int32)
    count = blank = 0
    for line_number, cells in rows:
        where = f"{path}, line {line_number}"
        if not any(cells):
            blank = blank or line_number
            continue
        if blank:  # not at the end: everything after it would belong to another sample
            raise DataError(f"{path}, line {blank}: empty; a list has a label in each line ({UNKNOWN} for unknown)")
        if len(cells) > 1:
            raise DataError(f"{where}: {len(cells)} columns, expected one; quote names with commas")
        if count < len(labels):
            labels[count] = reader.number(cells[0], where, unknown=True)
        count += 1
    if count != len(labels):
        raise DataError(
            f"{path}: {count} labels for {len(labels)} samples; to label some only, use a table with the columns "
            "index,label or path,label"
        )
    return LabelFile(labels, count)


def _read_table(
    path: Path, folder: Path, header: dict[str, int], rows: Iterable[Row], manifest: Manifest, reader: ClassReader,
    base: Labels | None,
) -> LabelFile:  # fmt: skip
    """Lines of index, key or path, and label, in any order; not every sample needs one."""
    by = next(name for name in _NAMES_OF_SAMPLES if name in header)
    names: list[str] = []
    given: list[int] = []
    lines: list[int] = []
    for line_number, cells in rows:
        if not any(cells):
            continue
        if len(cells) <= max(header.values()):
            raise DataError(f"{path}, line {line_number}: {len(cells)} columns, the header has more")
        names.append(cells[header[by]])
        given.append(reader.number(cells[header[_LABEL]], f"{path}, line {line_number}", unknown=True))
        lines.append(line_number)
    if by == "index":
        indices = [_index(name, manifest.samples, path, line) for name, line in zip(names, lines, strict=True)]
    else:
        indices = _indices_of_keys(path, folder, manifest, by, names, lines)
    labels = np.full(manifest.samples, UNKNOWN, dtype=np.int32) if base is None else base.copy()
    line_of = np.zeros(manifest.samples, dtype=np.int64)  # which line labelled the sample
    for index, label, name, line in zip(indices, given, names, lines, strict=True):
        if line_of[index]:
            raise DataError(f"{path}, line {line}: {by} {name} again, it is in line {line_of[index]} already")
        labels[index], line_of[index] = label, line
    return LabelFile(labels, len(indices))


def _index(text: str, samples: int, path: Path, line: int) -> int:
    index = int(text) if _INTEGER.fullmatch(text) else -1
    if not 0 <= index < samples:
        raise DataError(f"{path}, line {line}: index {text!r}: samples are 0 to {samples - 1}")
    return index


def _indices_of_keys(
    path: Path, folder: Path, manifest: Manifest, by: str, names: Sequence[str], lines: Sequence[int]
) -> list[int]:
    """The samples with these keys. Only the file's own keys are held in memory, not those of the whole split."""
    rows_of: dict[str, list[int]] = {}
    for row, name in enumerate(names):
        for key in _possible_keys(name):
            rows_of.setdefault(key, []).append(row)
    indices = [-1] * len(names)
    for info in manifest.shards:
        for place, key in enumerate(Shard(folder, info).index.keys):
            for row in rows_of.get(key, ()):
                indices[row] = info.first + place
    missing = [row for row, index in enumerate(indices) if index < 0]
    if missing:
        row = missing[0]
        more = f" ({len(missing)} such lines)" if len(missing) > 1 else ""
        raise DataError(
            f"{path}, line {lines[row]}: no sample has the {by} {names[row]!r}{more}; keys and paths "
            f"are relative to the --root of `sopdist prepare`{_nearest_key(folder, manifest, names[row])}"
        )
    return indices


def _nearest_key(folder: Path, manifest: Manifest, name: str) -> str:
    """Most often the beginning of a path is another, so the same file in another folder comes first."""
    last_parts = {key.rpartition("/")[2] for key in _possible_keys(name.rstrip("/").rpartition("/")[2])}
    some: list[str] = []
    for info in manifest.shards:
        for key in Shard(folder, info).index.keys:
            if key.rpartition("/")[2] in last_parts:
                return f"; did you mean {key!r}?"
            if len(some) < _MOST_COMPARED:
                some.append(key)
    return _did_you_mean(name, some)


def _possible_keys(name: str) -> set[str]:
    """A key as it is in the shards, or the path of the image in its source."""
    try:
        return {name, key_of(name), key_of(name, keep_extension=True)}
    except DataError:
        return {name}


def _did_you_mean(text: str, names: Sequence[str]) -> str:
    """The end of a message: the nearest name, whatever its case; nothing if none is near."""
    folded: dict[str, str] = {}
    for name in names:
        folded.setdefault(name.casefold(), name)
    close = difflib.get_close_matches(text.casefold(), folded, n=1)
    return f"; did you mean {folded[close[0]]!r}?" if close else ""


def _header(cells: Sequence[str]) -> dict[str, int]:
    """Where the columns of a table are; empty if this is no header."""
    known = (_LABEL, *_NAMES_OF_SAMPLES)
    places = {cell.lower(): place for place, cell in enumerate(cells) if cell.lower() in known}
    return places if _LABEL in places and len(places) > 1 else {}


def _refuse_unknown_columns(path: Path, first: Row, reader: ClassReader) -> None:
    """The first line of what is not a table: is it one that was meant to be?"""
    line, cells = first
    where = f"{path}, line {line}"
    if len(cells) == 1 and "," in cells[0] and not reader.is_name(cells[0]):  # a .txt
        cells = [cell.strip() for cell in cells[0].split(",")]
    if len(cells) > 1:
        raise DataError(
            f"{where}: several columns and no header that names them; it has {', '.join(map(repr, cells[:5]))}, "
            f"needed are {_COLUMNS}"
        )
    for separator, name in _OTHER_SEPARATORS.items():
        if separator in cells[0] and not reader.is_name(cells[0]):
            raise DataError(f"{where}: columns must be separated by commas, not by {name}: {cells[0]!r:.80}")


def _refuse_base(path: Path, base: Labels | None) -> None:
    if base is not None:
        raise DataError(f"{path}: --base is of no use here: only a table may leave samples out; leave it out")


def _rows(path: Path) -> Iterator[Row]:
    """The lines of a .txt or .csv file, stripped cells. In a .txt without a table's header a line is one cell."""
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
        return path.read_text(encoding="utf-8-sig")  # spreadsheets put a byte order mark in front
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
        raise DataError(f"{path}: several arrays, expected one; save it with numpy.save")
    return read_array(content, str(path))
