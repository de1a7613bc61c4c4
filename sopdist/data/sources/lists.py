"""The text files of a data set: lists of paths, of paths with labels, of names. Read once, errors with file and line.

Lists have up to millions of lines, so nothing here looks at the images they name.
"""

from __future__ import annotations

import argparse
import errno
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, ImageError

_MAX_BYTES = 1 << 30  # of an image; the largest that can be decoded has 0.4 GB even as plain pixels
_NOT_PLAIN = "not a plain file"
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


def find_files(names: Sequence[str], folders: Sequence[Path], suffixes: Sequence[str] = ("",)) -> dict[str, Path]:
    """Each file in the first of `folders` that has it; the error names all that are missing at once.

    With `suffixes` its name may go on with any of them, the first that is there.
    """
    found: dict[str, Path] = {}
    for name in names:
        for path in (folder / f"{name}{suffix}" for folder in folders for suffix in suffixes):
            if path.is_file():
                found.setdefault(name, path)
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
    for number, line in numbered_lines(path):
        image = _plain_path(line, lines, path, number)
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
            labels[_plain_path(image, labels, path, number)] = label
    return _not_empty(labels, path)


def _plain_path(image: str, earlier: dict[str, int], path: Path, number: int) -> str:
    """The path of a line, `./a//b.jpg` as `a/b.jpg`; not one of the `earlier` ones."""
    if image[0] == "/" or (".." in image and ".." in image.split("/")):
        raise DataError(
            f"{path}, line {number}: {image!r} leads out of the data set; paths must be relative, without .."
        )
    if image == "." or image.endswith(("/", "/.")) or "\0" in image:
        raise DataError(f"{path}, line {number}: {image!r} is not the path of a file")
    if "//" in image or "./" in image:
        image = "/".join(part for part in image.split("/") if part not in ("", "."))
    if image in earlier:
        raise DataError(f"{path}, line {number}: {image!r} is a duplicate, an earlier line has it already")
    return image


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
        return _read_plain(root / paths[number].removeprefix(drop))

    return read


def _read_plain(path: Path) -> bytes:
    """The content of a file that has an end: a pipe would wait for a writer, a device may never stop."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket
            raise ImageError(_NOT_PLAIN) from None
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ImageError(_NOT_PLAIN)
        if status.st_size > _MAX_BYTES:
            raise ImageError(f"{status.st_size:,} bytes, more than the {_MAX_BYTES:,} allowed")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)
