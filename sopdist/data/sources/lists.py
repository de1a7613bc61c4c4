"""Text files that list the images of a data set: paths, paths with labels, class names. Errors name file and line.

Lists have up to millions of lines, so nothing here accesses the listed images until they are read.
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

from ...errors import DataError, ImageError

_MAX_BYTES = 1 << 30  # limit for an image file; the largest decodable image takes 0.4 GB even as raw pixels
_NOT_REGULAR = "not a regular file"
_WHITESPACE = " \t\r"
_LABELLED = re.compile(r"(.*[^ \t])[ \t]+([^ \t]+)")  # the label follows the last whitespace: paths may contain some


def root_of(args: argparse.Namespace) -> Path:
    """The folder given by --root, checked to exist."""
    root = Path(args.root)
    if not root.is_dir():
        raise DataError(f"--root {root}: no such folder")
    return root


def find_file(name: str, folders: Sequence[Path]) -> Path:
    """Path of the file `name` in the first of `folders` that contains it; raises DataError if none does."""
    return find_files([name], folders)[name]


def find_files(names: Sequence[str], folders: Sequence[Path], suffixes: Sequence[str] = ("",)) -> dict[str, Path]:
    """Path of each file in the first of `folders` that contains it; the DataError lists all missing files.

    A file name may be followed by any of `suffixes`; the first match is used.
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


def read_bytes(path: Path) -> bytes:
    """The content of a file; raises DataError if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """(line number, line) of all lines that are not blank. Bytes that are not UTF-8 are kept, as in file names."""
    text = read_bytes(path).decode("utf-8-sig", "surrogateescape")
    for number, line in enumerate(text.split("\n"), start=1):  # not splitlines: it also splits at rarer characters
        if line := line.strip(_WHITESPACE):
            yield number, line


def read_names(path: Path, expected: int | None = None) -> tuple[str, ...]:
    """Read one class name per line; there must be `expected` of them."""
    names = tuple(name for _, name in numbered_lines(path))
    if expected is not None and len(names) != expected:
        raise DataError(f"{path}: {len(names)} class names, expected {expected}, one per line")
    return names


def read_paths(path: Path) -> dict[str, int]:
    """Read one path per line as {path: line number}, in file order. A duplicate path is an error."""
    lines: dict[str, int] = {}
    for number, line in numbered_lines(path):
        image = _plain_path(line, lines, path, number)
        lines[image] = number
    return _not_empty(lines, path)


def read_labelled(path: Path, classes: int, below: int | None = None) -> dict[str, int]:
    """Read lines `path label` as {path: label}, in file order; with `below`, only lines with a smaller label.

    The last whitespace separates path and label. A label outside 0 to `classes` - 1 or a duplicate path is an error.
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
            raise DataError(f"{path}, line {number}: label {text!r} of {image!r}; must be from 0 to {classes - 1}")
        if label < below:
            labels[_plain_path(image, labels, path, number)] = label
    return _not_empty(labels, path)


def _plain_path(image: str, earlier: dict[str, int], path: Path, number: int) -> str:
    """The normalised path of a line, `./a//b.jpg` -> `a/b.jpg`; must not be in `earlier`."""
    if image[0] == "/" or (".." in image and ".." in image.split("/")):
        raise DataError(f"{path}, line {number}: {image!r} is outside the data set; paths must be relative, without ..")
    if image == "." or image.endswith(("/", "/.")) or "\0" in image:
        raise DataError(f"{path}, line {number}: {image!r} is not the path of a file")
    if "//" in image or "./" in image:
        image = "/".join(part for part in image.split("/") if part not in ("", "."))
    if image in earlier:
        raise DataError(f"{path}, line {number}: {image!r} is a duplicate of an earlier line")
    return image


def _not_empty(entries: dict[str, int], path: Path) -> dict[str, int]:
    if not entries:
        raise DataError(f"{path}: has no usable entries; is the file complete?")
    return entries


def as_labels(labels: dict[str, int]) -> NDArray[np.int64]:
    """The values of {path: label} as an array, in order."""
    return np.fromiter(labels.values(), np.int64, len(labels))


def reader(root: Path, paths: list[str], drop: str = "") -> Callable[[int], bytes]:
    """A function that reads the i-th file of `paths` under `root`, after removing the prefix `drop` from its path."""

    def read(i: int) -> bytes:
        return _read_regular(root / paths[i].removeprefix(drop))

    return read


def _read_regular(path: Path) -> bytes:
    """The content of a regular file. Reading a pipe or a device might never return."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket
            raise ImageError(_NOT_REGULAR) from None
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ImageError(_NOT_REGULAR)
        if status.st_size > _MAX_BYTES:
            raise ImageError(f"{status.st_size:,} bytes, more than the {_MAX_BYTES:,} allowed")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)
