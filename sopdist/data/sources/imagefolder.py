"""Your own images, in a folder a class.

Expected under --root, either

  CLASS/any/levels/below.jpg          one split, called train

or, if all folders of --root are called train, val or test,

  train/CLASS/a.jpg                   a split each; val and test must have the classes of train
  val/CLASS/b.jpg

Images are files that end with .jpg .jpeg .jpe .jfif .png .webp .gif .bmp .tif or .tiff, in capitals, too; what they
really are is decided by their content. Classes are the names of the folders, sorted by their bytes (so Z comes before
a), and so are the images of a class: the order is the same on every machine. Hidden files and folders (.name) are
ignored, other files are left out and counted. Links to folders are followed, but in a split no folder is entered twice:
what lies in the folder of a class is of that class, whatever links lead there.

Splits: those that are there; where that is train and no val, --val SHARE holds one out. Label set: given.
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

from ..errors import DataError
from ..labels import GIVEN
from .lists import reader, root_of
from .source import SourceSplit

_TRAIN = "train"
_SPLITS = (_TRAIN, "val", "test")
_STRAY = "images outside of all classes"
_EXTENSIONS = frozenset((".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It has no options of its own."""


def find_splits(args: argparse.Namespace) -> list[SourceSplit]:
    """The splits that are there, or one called train."""
    root = root_of(args)
    _refuse_output_inside(root, Path(args.out))
    others: Counter[str] = Counter()
    places = _split_places(root)
    classes_of = {}
    for folder in {root, *(root / place for place in places.values())}:
        classes_of[folder], stray = _entries(folder, others)
        if stray:
            others[_STRAY] += len(stray)
    reference = root / next(iter(places.values()))
    splits = []
    for name, place in places.items():
        classes = classes_of[root / place]
        _check_classes(root / place, classes, reference, classes_of[reference])
        images = _images_of(root, place, classes, others)
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
        print(f"{root}: {sum(others.values())} other files are left out: {kinds}", file=sys.stderr)
    return splits


def _split_places(root: Path) -> dict[str, str]:
    """Each split's folder, relative to `root`."""
    folders, _ = _entries(root, Counter())
    if folders and set(folders) <= set(_SPLITS):
        return {name: name for name in _SPLITS if name in folders}
    for name in _SPLITS:  # `train` may well be a class, but not if it has folders in it
        if name in folders and _entries(root / name, Counter())[0]:
            beside = next(folder for folder in folders if folder not in _SPLITS)
            raise DataError(
                f"{root}: {name}/ looks like a split, {beside!r} beside it does not; move it away, or name a --root "
                "that has either splits only or classes only"
            )
    return {_TRAIN: ""}


def _images_of(root: Path, place: str, classes: list[str], others: Counter[str]) -> list[list[str]]:
    """The images of each class of the split in `place`, relative to `root` and sorted by their bytes.

    A link may lead into another class. So all that can be reached without links is taken first, and a link then finds
    what is left.
    """
    images: list[list[str]] = [[] for _ in classes]
    seen = {_identity(root), _identity(root / place)}
    waiting: list[tuple[int, str]] = []  # class, folder
    for label, name in enumerate(classes):
        folder = posixpath.join(place, name)
        identity = _identity(root / folder)
        if identity in seen:
            raise DataError(f"{root / folder}: is a link to the folder of another class, or to one above it; remove it")
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
    """Not entered before; from now on it is."""
    identity = _identity(folder)
    if identity in seen:
        return False
    seen.add(identity)
    return True


def _entries(folder: Path, others: Counter[str]) -> tuple[list[str], list[str]]:
    """Names of the folders and of the images in a folder, sorted; other files are counted by extension."""
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
    # entry.is_dir() would raise for a link that leads to itself; and only links cost a look at the disk.
    return os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir(follow_symlinks=False)


def _is_file(entry: os.DirEntry[str]) -> bool:
    """Also a broken link: it is listed among what was skipped. But not a pipe, on which reading would wait forever."""
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
        raise DataError(f"{folder}: has classes that {reference} does not have: {', '.join(map(repr, unknown[:5]))}")
    lacking = [name for name in classes if name not in found_set]
    if lacking:
        raise DataError(
            f"{folder}: lacks classes of {reference}: {', '.join(map(repr, lacking[:5]))}; if there are no images of "
            "them, make empty folders"
        )
    if len(found) < 2:
        what = f"one folder only ({found[0]!r})" if found else "no folders"
        raise DataError(f"{folder}: has {what}, expected one for each class; is --root a level too high or too low?")


def _refuse_output_inside(root: Path, out: Path) -> None:
    if out.resolve().is_relative_to(root.resolve()):
        raise DataError(f"--out {out} is inside of --root {root}: its folders would be taken for classes; move it out")
