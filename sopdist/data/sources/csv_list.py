"""Your own images, with a table of paths and labels.

Expected: --csv FILE (default: labels.csv in --root), in UTF-8, with a header line and one line per image:

  path,label,clean,split
  photos/a.jpg,cat,dog,train
  "photos/b, c.jpg",dog,,val

path     relative to --root, without .., unique within a split; may be a link to any file
label    name or index of the class; -1 if unknown
clean    the clean label; empty or -1 if unknown (optional column)
split    train, val, ...; without this column, all images belong to train (optional column)

Classes: with --classes FILE, its lines, in that order; a label is then one of these names, or a line number from 0.
Without it, if all labels are numbers, 0 to the largest; if none is, the names that occur, sorted by bytes.
If class names are also numbers, --as says how to read the labels.

Splits: those in the table; if there is a train but no val, --val FRACTION holds one out. Images keep the order of the
table. Label sets: given and, with that column, clean.
"""

from __future__ import annotations

import argparse
import codecs
import csv
import io
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...errors import DataError
from ..keys import key_of
from ..labelling.files import NAMES, NUMBERS, ClassReader
from ..labels import CLEAN, GIVEN, UNKNOWN
from .lists import read_names, reader, root_of
from .source import SourceSplit

_DEFAULT = "labels.csv"
_UNKNOWN = str(UNKNOWN)
_OTHER_SEPARATORS = {";": "semicolons", "\t": "tabs"}
_PATH, _LABEL, _CLEAN, _SPLIT = _COLUMNS = ("path", "label", "clean", "split")
_TRAIN = "train"
_SPLIT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")  # it becomes a folder
_INTEGER = re.compile(r"[0-9]{1,18}")
_MAX_UNNAMED_CLASSES = 100_000  # a larger number is more likely a mistake than a class


class _Row(NamedTuple):
    """One image of the table."""

    line: int
    path: str
    label: str  # "-1" if unknown, as in `clean`
    clean: str
    split: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the table, the list of classes, and how labels are written."""
    parser.add_argument("--csv", type=Path, metavar="FILE", help=f"the table (default: {_DEFAULT} in --root)")
    parser.add_argument("--classes", type=Path, metavar="FILE", help="class names in order, one per line")
    parser.add_argument(
        "--as",
        dest="written_as",
        choices=(NUMBERS, NAMES),
        help="how to read the labels, if class names are also numbers",
    )


def find_splits(args: argparse.Namespace) -> list[SourceSplit]:
    """The splits in the table, in the order of their first occurrence."""
    root = root_of(args)
    table: Path = args.csv or root / _DEFAULT
    rows = list(_read_rows(table))
    if not rows:
        raise DataError(f"{table}: has no images")
    _refuse_duplicates(table, rows)
    if args.classes is None:
        classes, written_as = _classes(table, rows, args.written_as)
    else:
        classes, written_as = read_names(args.classes), args.written_as
    if len(set(classes)) != len(classes) or not classes:
        raise DataError(f"{args.classes}: lists a class twice, or no classes at all")
    class_reader = ClassReader(classes, written_as)
    columns = {GIVEN: _LABEL}
    if any(row.clean != _UNKNOWN for row in rows):
        columns[CLEAN] = _CLEAN
    splits = []
    for split in dict.fromkeys(row.split for row in rows):
        chosen = [row for row in rows if row.split == split]
        labels = {
            name: [
                class_reader.parse(getattr(row, column), f"{table}, line {row.line}", unknown=True) for row in chosen
            ]
            for name, column in columns.items()
        }
        paths = [row.path for row in chosen]
        splits.append(
            SourceSplit(
                dataset=table.resolve().parent.name or table.stem,
                name=split,
                classes=classes,
                paths=paths,
                labels={name: np.array(numbers, dtype=np.int64) for name, numbers in labels.items()},
                read=reader(root, paths),
                origins={
                    name: {"source": "csv", "file": table.name, "column": column} for name, column in columns.items()
                },
            )
        )
    return splits


def _read_rows(table: Path) -> Iterator[_Row]:
    lines = csv.reader(io.StringIO(_text(table), newline=""), strict=True)
    columns: list[str] | None = None
    try:
        for fields in lines:
            where = f"{table}, line {lines.line_num}"
            if not any(field.strip() for field in fields):
                continue
            if columns is None:
                columns = _columns(fields, where)
                continue
            if len(fields) != len(columns):
                raise DataError(f"{where}: {len(fields)} fields, expected {len(columns)}: {','.join(columns)}")
            yield _row(dict(zip(columns, fields, strict=True)), lines.line_num, where)
    except csv.Error as error:
        raise DataError(f"{table}, line {lines.line_num}: {error}") from None


def _text(table: Path) -> str:
    try:
        content = table.read_bytes()
    except OSError as error:
        raise DataError(f"{table}: cannot be read: {error.strerror}; set --csv to the path of the table") from None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        rest = error.object  # content without the byte order mark
        line = rest.count(b"\n", 0, error.start) + 1
        encoding = "UTF-16" if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "WINDOWS-1252"
        raise DataError(
            f"{table}, line {line}: not UTF-8 (byte {rest[error.start]:#04x}); convert it, e.g. with "
            f"`iconv -f {encoding} -t UTF-8`"
        ) from None


def _columns(fields: list[str], where: str) -> list[str]:
    columns = [field.strip() for field in fields]
    wrong = [name for name in columns if name not in _COLUMNS]
    if wrong or len(set(columns)) != len(columns) or not {_PATH, _LABEL} <= set(columns):
        line = ",".join(fields)
        other = next((name for sign, name in _OTHER_SEPARATORS.items() if sign in line), None)
        hint = "" if other is None else f"; they must be separated by commas, not by {other}"
        raise DataError(
            f"{where}: columns {','.join(columns)}; expected {_PATH},{_LABEL} and optionally {_CLEAN}, {_SPLIT}{hint}"
        )
    return columns


def _row(fields: dict[str, str], line: int, where: str) -> _Row:
    path = fields[_PATH].removeprefix("./")
    try:
        key_of(path)
    except DataError as error:
        raise DataError(f"{where}: {error}") from None
    label, clean = fields[_LABEL].strip(), fields.get(_CLEAN, "").strip()
    split = fields.get(_SPLIT, _TRAIN).strip()
    if not label:
        raise DataError(f"{where}: {path!r} has no label; write {_UNKNOWN} if it is unknown")
    if not _SPLIT_NAME.fullmatch(split):
        raise DataError(f"{where}: split {split!r}; use letters, digits, _ and -")
    return _Row(line, path, label, clean or _UNKNOWN, split)


def _refuse_duplicates(table: Path, rows: list[_Row]) -> None:
    first: dict[tuple[str, str], int] = {}
    for row in rows:
        earlier = first.setdefault((row.split, row.path), row.line)
        if earlier != row.line:
            raise DataError(f"{table}, line {row.line}: {row.path!r} is a duplicate of line {earlier}")


def _classes(table: Path, rows: Sequence[_Row], written_as: str | None) -> tuple[tuple[str, ...], str]:
    """Infer the classes from the labels in the table, and whether these are numbers or names."""
    line_of: dict[str, int] = {}  # line of each label's first occurrence
    for row in rows:
        for text in (row.label, row.clean):
            if text != _UNKNOWN:
                line_of.setdefault(text, row.line)
    if not line_of:
        raise DataError(f"{table}: all labels are {_UNKNOWN} (unknown)")
    if written_as is None:
        written_as = _numbers_or_names(table, line_of)
    if written_as == NAMES:
        return tuple(sorted(line_of, key=os.fsencode)), NAMES
    for text, line in line_of.items():
        if not _INTEGER.fullmatch(text):
            raise DataError(f"{table}, line {line}: label {text!r} is not a class index")
    largest = max(map(int, line_of))
    if largest >= _MAX_UNNAMED_CLASSES:
        raise DataError(f"{table}: label {largest} would make {largest + 1:,} classes; list them with --classes")
    return tuple(str(label) for label in range(largest + 1)), NUMBERS


def _numbers_or_names(table: Path, line_of: dict[str, int]) -> str:
    """Whether labels are numbers or names. A mixture is an error: a single `nan` must not turn all numbers into names,
    which would change the class order."""
    integers = {text for text in line_of if _INTEGER.fullmatch(text)}
    for text, line in line_of.items():
        if text not in integers and (integers or _is_number(text)):
            first = min(integers, key=line_of.__getitem__, default="")
            others = f", but others are, e.g. {first!r} in line {line_of[first]}" if integers else ""
            raise DataError(
                f"{table}, line {line}: label {text!r} is not an integer >= 0{others}; write {_UNKNOWN} if it is "
                f"unknown, or add --as {NAMES} if all labels are names"
            )
    return NUMBERS if integers else NAMES


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
