"""Your own images, with a table of paths and labels.

Expected: --csv FILE (default: labels.csv under --root), in UTF-8, with a header line and a line an image:

  path,label,clean,split
  photos/a.jpg,cat,dog,train
  "photos/b, c.jpg",dog,,val

path     relative to --root, without .., and only once in a split; links may lead anywhere
label    the name of a class, or its number; -1 where it is not known
clean    the true label, if it is known; empty or -1 where it is not (optional column)
split    train, val, ...; without this column all is train (optional column)

Classes: with --classes FILE its lines, in that order; a label is then one of these names, or a line's number from 0.
Without it, if all labels are numbers, 0 to the greatest; if none is, the names that occur, sorted by their bytes.
Where names are numbers, too, --as says what is meant.

Splits: those of the table; where that is train and no val, --val SHARE holds one out. Images keep the order of the
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

from ..errors import DataError
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
_WHOLE = re.compile(r"[0-9]{1,18}")
_MOST_UNNAMED = 100_000  # a greater number is more likely a mistake than a class


class _Row(NamedTuple):
    """An image of the table."""

    line: int
    path: str
    label: str  # of both, -1 is unknown
    clean: str
    split: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The two files, and how to read labels."""
    parser.add_argument("--csv", type=Path, metavar="FILE", help=f"the table (default: {_DEFAULT} under --root)")
    parser.add_argument("--classes", type=Path, metavar="FILE", help="names of the classes in order, one a line")
    parser.add_argument(
        "--as",
        dest="written_as",
        choices=(NUMBERS, NAMES),
        help="what labels are, if names of classes are numbers, too",
    )


def find_splits(args: argparse.Namespace) -> list[SourceSplit]:
    """The splits that the table names, in the order in which they first occur."""
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
        raise DataError(f"{args.classes}: names a class twice, or none at all")
    reader_of_classes = ClassReader(classes, written_as)
    columns = {GIVEN: _LABEL}
    if any(row.clean != _UNKNOWN for row in rows):
        columns[CLEAN] = _CLEAN
    splits = []
    for split in dict.fromkeys(row.split for row in rows):
        chosen = [row for row in rows if row.split == split]
        labels = {
            name: [
                reader_of_classes.number(getattr(row, column), f"{table}, line {row.line}", unknown=True)
                for row in chosen
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
        raise DataError(f"{table}: cannot be read: {error.strerror}; name the table with --csv") from None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        rest = error.object  # the content without a byte order mark
        line = rest.count(b"\n", 0, error.start) + 1
        encoding = "UTF-16" if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "WINDOWS-1252"
        raise DataError(
            f"{table}, line {line}: not UTF-8 (byte {rest[error.start]:#04x}); convert it, for instance with "
            f"`iconv -f {encoding} -t UTF-8`"
        ) from None


def _columns(fields: list[str], where: str) -> list[str]:
    columns = [field.strip() for field in fields]
    wrong = [name for name in columns if name not in _COLUMNS]
    if wrong or len(set(columns)) != len(columns) or not {_PATH, _LABEL} <= set(columns):
        line = ",".join(fields)
        other = next((name for sign, name in _OTHER_SEPARATORS.items() if sign in line), None)
        hint = "" if other is None else f"; they must be separated by commas, here it seems to be by {other}"
        raise DataError(
            f"{where}: columns {','.join(columns)}; expected {_PATH},{_LABEL} and, if you like, {_CLEAN} and {_SPLIT}"
            f"{hint}"
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
        raise DataError(f"{where}: {path!r} has no label; write {_UNKNOWN} if it is not known")
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
    """Without a list of classes: what occurs, and whether that is numbers or names."""
    line_of: dict[str, int] = {}  # where each text is first met
    for row in rows:
        for text in (row.label, row.clean):
            if text != _UNKNOWN:
                line_of.setdefault(text, row.line)
    if not line_of:
        raise DataError(f"{table}: all labels are {_UNKNOWN}, unknown")
    if written_as is None:
        written_as = _numbers_or_names(table, line_of)
    if written_as == NAMES:
        return tuple(sorted(line_of, key=os.fsencode)), NAMES
    for text, line in line_of.items():
        if not _WHOLE.fullmatch(text):
            raise DataError(f"{table}, line {line}: label {text!r} is not the number of a class")
    greatest = max(map(int, line_of))
    if greatest >= _MOST_UNNAMED:
        raise DataError(f"{table}: label {greatest} would make {greatest + 1:,} classes; name them with --classes")
    return tuple(str(number) for number in range(greatest + 1)), NUMBERS


def _numbers_or_names(table: Path, line_of: dict[str, int]) -> str:
    """A single `nan` among numbers must not turn them all into names, whose order is another one."""
    whole = {text for text in line_of if _WHOLE.fullmatch(text)}
    for text, line in line_of.items():
        if text not in whole and (whole or _is_number(text)):
            first = min(whole, key=line_of.__getitem__, default="")
            others = f", others are, such as {first!r} in line {line_of[first]}" if whole else ""
            raise DataError(
                f"{table}, line {line}: label {text!r} is not a whole number from 0 on{others}; write {_UNKNOWN} if it "
                f"is not known, or, if all labels are names, add --as {NAMES}"
            )
    return NUMBERS if whole else NAMES


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
