"""Your own images, with a table of paths and labels.

Expected: --csv FILE (default: labels.csv under --root), in UTF-8, with a header line and a line an image:

  path,label,clean,split
  photos/a.jpg,cat,dog,train
  "photos/b, c.jpg",dog,,val

path     relative to --root, without .., and only once in a split; links may lead anywhere
label    the name of a class, or its number
clean    the true label, if it is known; empty or -1 where it is not (optional column)
split    train, val, ...; without this column all is train (optional column)

Classes: with --classes FILE its lines, in that order; a label is then one of these names, or a line's number from 0.
Without it, if all labels are numbers, 0 to the greatest; otherwise the names that occur, sorted by their bytes.

Images keep the order of the table. Label sets: given and, with that column, clean.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..errors import DataError
from ..keys import key_of
from ..labels import CLEAN, GIVEN, UNKNOWN
from .lists import read_names, reader, root_of
from .source import SourceSplit

_DEFAULT = "labels.csv"
_PATH, _LABEL, _CLEAN, _SPLIT = _COLUMNS = ("path", "label", "clean", "split")
_TRAIN = "train"
_SPLIT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")  # it becomes a folder
_NUMBER = re.compile(r"[0-9]{1,18}")
_MOST_UNNAMED = 100_000  # a greater number is more likely a mistake than a class


class _Row(NamedTuple):
    """An image of the table."""

    line: int
    path: str
    label: str
    clean: str  # empty if unknown
    split: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The two files."""
    parser.add_argument("--csv", type=Path, metavar="FILE", help=f"the table (default: {_DEFAULT} under --root)")
    parser.add_argument("--classes", type=Path, metavar="FILE", help="names of the classes in order, one a line")


def find_splits(args: argparse.Namespace) -> list[SourceSplit]:
    """The splits that the table names, in the order in which they first occur."""
    root = root_of(args)
    table: Path = args.csv or root / _DEFAULT
    rows = list(_read_rows(table))
    if not rows:
        raise DataError(f"{table}: has no images")
    _refuse_duplicates(table, rows)
    classes = _classes(table, rows) if args.classes is None else read_names(args.classes)
    if len(set(classes)) != len(classes) or not classes:
        raise DataError(f"{args.classes}: names a class twice, or none at all")
    has_clean = any(row.clean for row in rows)
    number_of = {str(number): number for number in range(len(classes))}
    number_of.update({name: number for number, name in enumerate(classes)})  # a name that is a number is a name
    splits = []
    for split in dict.fromkeys(row.split for row in rows):
        chosen = [row for row in rows if row.split == split]
        labels = {GIVEN: [_number(table, row, row.label, number_of) for row in chosen]}
        if has_clean:
            labels[CLEAN] = [_number(table, row, row.clean, number_of) if row.clean else UNKNOWN for row in chosen]
        paths = [row.path for row in chosen]
        splits.append(
            SourceSplit(
                dataset=table.resolve().parent.name or table.stem,
                name=split,
                classes=tuple(classes),
                paths=paths,
                labels={name: np.array(numbers, dtype=np.int64) for name, numbers in labels.items()},
                read=reader(root, paths),
                origins={
                    name: {"source": "csv", "file": table.name, "column": column}
                    for name, column in ((GIVEN, _LABEL), (CLEAN, _CLEAN))
                    if name in labels
                },
            )
        )
    return splits


def _read_rows(table: Path) -> Iterator[_Row]:
    try:
        # Bytes that are not UTF-8 survive, as in file names.
        text = table.read_bytes().decode("utf-8-sig", "surrogateescape")
    except OSError as error:
        raise DataError(f"{table}: cannot be read: {error.strerror}; name the table with --csv") from None
    lines = csv.reader(io.StringIO(text, newline=""), strict=True)
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


def _columns(fields: list[str], where: str) -> list[str]:
    columns = [field.strip() for field in fields]
    wrong = [name for name in columns if name not in _COLUMNS]
    if wrong or len(set(columns)) != len(columns) or not {_PATH, _LABEL} <= set(columns):
        raise DataError(
            f"{where}: columns {','.join(columns)}; expected {_PATH},{_LABEL} and, if you like, {_CLEAN} and {_SPLIT}"
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
        raise DataError(f"{where}: {path!r} has no label")
    if not _SPLIT_NAME.fullmatch(split):
        raise DataError(f"{where}: split {split!r}; use letters, digits, _ and -")
    return _Row(line, path, label, "" if clean == str(UNKNOWN) else clean, split)


def _refuse_duplicates(table: Path, rows: list[_Row]) -> None:
    first: dict[tuple[str, str], int] = {}
    for row in rows:
        earlier = first.setdefault((row.split, row.path), row.line)
        if earlier != row.line:
            raise DataError(f"{table}, line {row.line}: {row.path!r} is a duplicate of line {earlier}")


def _classes(table: Path, rows: list[_Row]) -> tuple[str, ...]:
    """Without a list of classes: what occurs."""
    names = {name for row in rows for name in (row.label, row.clean) if name}
    if not all(_NUMBER.fullmatch(name) for name in names):
        return tuple(sorted(names, key=os.fsencode))
    greatest = max(map(int, names))
    if greatest >= _MOST_UNNAMED:
        raise DataError(f"{table}: label {greatest} would make {greatest + 1:,} classes; name them with --classes")
    return tuple(str(number) for number in range(greatest + 1))


def _number(table: Path, row: _Row, label: str, number_of: dict[str, int]) -> int:
    number = number_of.get(label)
    if number is None:
        raise DataError(
            f"{table}, line {row.line}: label {label!r} of {row.path!r} is neither one of the {len(number_of)} names "
            "nor a number of a class"
        )
    return number
