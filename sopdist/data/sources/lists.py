"""The text files of a data set: lists of paths, of paths with labels, of names. Read once, errors with file and line.

Lists have up to millions of lines, so nothing here looks at the images they name.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError

_BLANKS = " \t\r"
_LABELLED = re.compile(r"(.*[^ \t])[ \t]+([^ \t]+)")  # the label is what follows the last blank: paths may have some


def root_of(args: argparse.Namespace) -> Path:
    """The folder that --root names."""
    root = Path(args.root)
    if not root.is_dir():
        raise DataError(f"--root {root}: no such folder")
    return root


def find_file(name: str, folders: Sequence[Path]) -> Path:
    """The first of `folders` that has the file `name`; the error says where it was looked for."""
    return find_files([name], folders)[name]


def find_files(names: Sequence[str], folders: Sequence[Path]) -> dict[str, Path]:
    """Each file in the first of `folders` that has it; the error names all that are missing at once."""
    found: dict[str, Path] = {}
    for name in names:
        for folder in folders:
            if (folder / name).is_file():
                found.setdefault(name, folder / name)
    missing = [name for name in names if name not in found]
    if missing:
        raise DataError(f"missing: {', '.join(missing)}; looked in {', '.join(map(str, folders))}")
    return found


def content_of(path: Path) -> bytes:
    """The whole file."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """(line number, line) of all lines that are not blank. Bytes that are not UTF-8 survive, as in file names."""
    text = content_of(path).decode("utf-8-sig", "surrogateescape")
    for number, line in enumerate(text.split("\n"), start=1):  # not splitlines: it also cuts at rarer characters
        if line := line.strip(_BLANKS):
            yield number, line


def read_names(path: Path, expected: int | None = None) -> tuple[str, ...]:
    """A name a line; `expected` of them."""
    names = tuple(name for _, name in numbered_lines(path))
    if expected is not None and len(names) != expected:
        raise DataError(f"{path}: {len(names)} class names, expected {expected}, one a line")
    return names


def read_paths(path: Path) -> dict[str, int]:
    """A path a line -> {path: line number}, in the order of the file. The same path twice is an error."""
    lines: dict[str, int] = {}
    for number, image in numbered_lines(path):
        _check_path(image, lines, path, number)
        lines[image] = number
    return _not_empty(lines, path)


def read_labelled(path: Path, classes: int, below: int | None = None) -> dict[str, int]:
    """`path label` a line -> {path: label}, in the order of the file; with `below` only lines with a smaller label.

    `path` is what precedes the last blank. A label outside of 0 to `classes` - 1, or the same path twice, is an error.
    """
    label_of = {str(label): label for label in range(classes)}
    below = classes if below is None else below
    labels: dict[str, int] = {}
    for number, line in numbered_lines(path):
        match = _LABELLED.fullmatch(line)
        if match is None:
            raise DataError(f"{path}, line {number}: expected `path label`, found {line!r}")
        image, text = match.groups()
        label = label_of.get(text)
        if label is None:
            raise DataError(f"{path}, line {number}: label {text!r} of {image!r}; allowed are 0 to {classes - 1}")
        if label < below:
            _check_path(image, labels, path, number)
            labels[image] = label
    return _not_empty(labels, path)


def _check_path(image: str, earlier: dict[str, int], path: Path, number: int) -> None:
    if image in earlier:
        raise DataError(f"{path}, line {number}: {image!r} is a duplicate, an earlier line has it already")
    if image[0] == "/" or (".." in image and ".." in image.split("/")):
        raise DataError(
            f"{path}, line {number}: {image!r} leads out of the data set; paths must be relative, without .."
        )


def _not_empty(entries: dict[str, int], path: Path) -> dict[str, int]:
    if not entries:
        raise DataError(f"{path}: has no entries that could be used; is the file complete?")
    return entries


def as_labels(labels: dict[str, int]) -> NDArray[np.int64]:
    """The labels of {path: label}, in its order."""
    return np.fromiter(labels.values(), np.int64, len(labels))


def reader(root: Path, paths: list[str], drop: str = "") -> Callable[[int], bytes]:
    """number -> content of the file at that place of `paths` under `root`; a prefix `drop` is not part of its place."""

    def read(number: int) -> bytes:
        return (root / paths[number].removeprefix(drop)).read_bytes()

    return read
