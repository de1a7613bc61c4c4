"""Your own images, one folder per class.

Expected layout under --root, either

  CLASS/any/subfolders/a.jpg          one split, called train

or, if all folders in --root are called train, val or test,

  train/CLASS/a.jpg                   one split each; val and test must have the same classes as train
  val/CLASS/b.jpg

Images are files ending in .jpg .jpeg .jpe .jfif .png .webp .gif .bmp .tif or .tiff, in lower or upper case. Their
format is detected from their content. Classes are the folder names. Classes, and the images of a class, are sorted by
bytes (so Z comes before a), which gives the same order on every machine. Hidden files and folders (.name) are ignored;
other files are skipped and counted. Links to folders are followed, but no folder is entered twice in a split: files in
the folder of a class belong to that class, whatever links point there.

Splits: those found; if there is a train but no val, --val FRACTION holds one out. Label set: given.
"""

from __future__ import annotations

import argparse
import itertools
import os
import posixpath
import sys
from collections import Counter
from pathlib import Path

import numpy as np

from ...errors import DataError
from ..labels import GIVEN
from .lists import reader, root_of
from .source import SourceSplit

_TRAIN = "train"
_SPLITS = (_TRAIN, "val", "test")
_STRAY = "images outside all class folders"
_EXTENSIONS = frozenset((".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No options of its own."""


def find_splits(args: argparse.Namespace) -> list[SourceSplit]:
    """The splits found, or a single one called train."""
    root = root_of(args)
    _refuse_output_inside(root, Path(args.out))
    others: Counter[str] = Counter()
    split_folders = _find_split_folders(root)
    classes_of = {}
    for folder in {root, *(root / folder for folder in split_folders.values())}:
        classes_of[folder], stray = _entries(folder, others)
        if stray:
            others[_STRAY] += len(stray)
    reference = root / next(iter(split_folders.values()))
    splits = []
    for name, split_folder in split_folders.items():
        classes = classes_of[root / split_folder]
        _check_classes(root / split_folder, classes, reference, classes_of[reference])
        images = _find_images(root, split_folder, classes, others)
        paths = list(itertools.chain.from_iterable(images))
        splits.append(
            SourceSplit(
                dataset=root.resolve().name or "images",
                name=name,
                classes=tuple(classes),
                paths=paths,
                labels={GIVEN: np.repeat(np.arange(len(images)), [len(group) for group in images])},
                read=reader(root, paths),
                origins={GIVEN: {"source": "imagefolder", "labels": "names of folders"}},
            )
        )
    if others:
        kinds = ", ".join(f"{count} {kind or 'without extension'}" for kind, count in sorted(others.items()))
        print(f"{root}: {sum(others.values())} other files are skipped: {kinds}", file=sys.stderr)
    return splits


def _find_split_folders(root: Path) -> dict[str, str]:
    """The folder of each split, relative to `root`."""
    folders, _ = _entries(root, Counter())
    if folders and set(folders) <= set(_SPLITS):
        return {name: name for name in _SPLITS if name in folders}
    for name in _SPLITS:  # `train` may be a class, but not if it contains folders
        if name in folders and _entries(root / name, Counter())[0]:
            other = next(folder for folder in folders if folder not in _SPLITS)
            raise DataError(
                f"{root}: {name}/ looks like a split, but {other!r} next to it does not; move it away, or choose a "
                "--root that contains either only splits or only classes"
            )
    return {_TRAIN: ""}


def _find_images(root: Path, split_folder: str, classes: list[str], others: Counter[str]) -> list[list[str]]:
    """The images of each class of a split, relative to `root` and sorted by bytes.

    A link may point into another class. So all folders that can be reached without links are visited first; a link then
    only adds folders that were not visited.
    """
    images: list[list[str]] = [[] for _ in classes]
    seen = {_identity(root), _identity(root / split_folder)}
    waiting: list[tuple[int, str]] = []  # class, folder
    for label, name in enumerate(classes):
        folder = posixpath.join(split_folder, name)
        identity = _identity(root / folder)
        if identity in seen:
            raise DataError(
                f"{root / folder}: is a link to the folder of another class, or to a parent folder; remove it"
            )
        seen.add(identity)
        waiting.append((label, folder))
    while waiting:
        links = []
        for label, start in waiting:
            below = [start]
            while below:
                folder = below.pop()
                folders, files = _entries(root / folder, others)
                images[label] += (f"{folder}/{name}" for name in files)
                for path in (f"{folder}/{name}" for name in folders):
                    if (root / path).is_symlink():
                        links.append((label, path))
                    elif _is_new(root / path, seen):
                        below.append(path)
        waiting = [(label, path) for label, path in links if _is_new(root / path, seen)]
    return [sorted(group, key=os.fsencode) for group in images]


def _is_new(folder: Path, seen: set[tuple[int, int]]) -> bool:
    """Whether the folder was not visited before; marks it as visited."""
    identity = _identity(folder)
    if identity in seen:
        return False
    seen.add(identity)
    return True


def _entries(folder: Path, others: Counter[str]) -> tuple[list[str], list[str]]:
    """Names of the folders and the images in a folder, sorted; counts other files by extension."""
    folders, images = [], []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                extension = os.path.splitext(entry.name)[1].lower()
                if _is_folder(entry):
                    folders.append(entry.name)
                elif extension in _EXTENSIONS and _is_file(entry):
                    images.append(entry.name)
                else:
                    others[extension] += 1
    except OSError as error:
        raise DataError(f"{folder}: cannot be read: {error.strerror}") from None
    return sorted(folders, key=os.fsencode), sorted(images, key=os.fsencode)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    # entry.is_dir() would raise for a link that points to itself. Only links need a system call.
    return os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir(follow_symlinks=False)


def _is_file(entry: os.DirEntry[str]) -> bool:
    """Whether it is a regular file, or a broken link, which is later listed as skipped. Reading a pipe would block."""
    if entry.is_symlink():
        return os.path.isfile(entry.path) or not os.path.exists(entry.path)
    return entry.is_file(follow_symlinks=False)


def _identity(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino


def _check_classes(folder: Path, found: list[str], reference: Path, classes: list[str]) -> None:
    found_set, classes_set = set(found), set(classes)
    unknown = [name for name in found if name not in classes_set]
    if unknown:
        raise DataError(f"{folder}: has classes that are not in {reference}: {', '.join(map(repr, unknown[:5]))}")
    lacking = [name for name in classes if name not in found_set]
    if lacking:
        raise DataError(
            f"{folder}: lacks classes of {reference}: {', '.join(map(repr, lacking[:5]))}; create empty folders for "
            "classes without images"
        )
    if len(found) < 2:
        what = f"only one folder ({found[0]!r})" if found else "no folders"
        raise DataError(f"{folder}: has {what}, expected one per class; is --root a level too high or too low?")


def _refuse_output_inside(root: Path, out: Path) -> None:
    if out.resolve().is_relative_to(root.resolve()):
        raise DataError(f"--out {out} is inside --root {root}: its folders would be taken for classes; move it out")
