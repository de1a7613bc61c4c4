"""WebVision 1.0: photos found by searching Google and Flickr for the 1,000 classes of ImageNet.

Expected layout under --root (the resized version is sufficient):

  info/synsets.txt                   line i is class i: n01440764 tench, Tinca tinca
  info/train_filelist_google.txt     google/q0001/abc.jpg 0      or, relative to google/: q0001/abc.jpg 0
  info/train_filelist_flickr.txt     the same for flickr/        (only --subset full)
  info/train_filelist_all.txt        both                        (only --subset full)
  info/val_filelist.txt              val000001.jpg 17
  google/..., flickr/..., val_images_256/...

Splits: train and val. Subsets, each in the order of its file:

  mini      lines of the Google list with a label below 50 (65,944 images), and the same classes of val
  google    the full Google list
  full      train_filelist_all.txt; if that is missing, the Google list followed by the Flickr list

Label sets: given, and clean for val, whose labels were checked by humans.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from ...errors import DataError
from ..labels import CLEAN, GIVEN
from .lists import as_labels, find_file, numbered_lines, read_labelled, reader, root_of
from .source import SourceSplit, select_splits

MINI_CLASSES = 50
_TRAIN_SPLIT, _VAL_SPLIT = "train", "val"
_MINI, _GOOGLE, _FULL = "mini", "google", "full"
_ALL, _VAL, _SYNSETS = "train_filelist_all.txt", "val_filelist.txt", "synsets.txt"
_TRAIN_FOLDERS = ("google", "flickr")
_VAL_FOLDER = "val_images_256"
_SYNSET = re.compile(r"(n\d{8})(?:[ \t]+.*)?")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare --subset."""
    parser.add_argument(
        "--subset", choices=(_MINI, _GOOGLE, _FULL), default=_MINI, help="training images to use (default: %(default)s)"
    )


def find_splits(args: argparse.Namespace) -> list[SourceSplit]:
    """train and val of the subset."""
    root, subset = root_of(args), args.subset
    info = [root / "info", root]
    synsets_path = find_file(_SYNSETS, info)
    classes = tuple(read_synsets(synsets_path).values())
    below = MINI_CLASSES if subset == _MINI else len(classes)
    if below > len(classes):
        raise DataError(f"{synsets_path}: {len(classes)} classes, mini WebVision needs the first {MINI_CLASSES}")

    splits = []
    for name in select_splits((_TRAIN_SPLIT, _VAL_SPLIT), args.splits):
        files = _train_files(subset, info) if name == _TRAIN_SPLIT else {find_file(_VAL, info): _VAL_FOLDER}
        images: dict[str, int] = {}
        for path, folder in files.items():
            images.update(_relative_to_root(read_labelled(path, len(classes), below), path, folder))
        for top in dict.fromkeys(image.split("/", 1)[0] for image in images):
            _check_folder(root / top)
        labels = as_labels(images)
        origin: dict[str, Any] = {"source": "webvision", "subset": subset, "files": [path.name for path in files]}
        sets = [GIVEN] if name == _TRAIN_SPLIT else [GIVEN, CLEAN]
        paths = list(images)
        splits.append(
            SourceSplit(
                dataset=f"webvision-{subset}",
                name=name,
                classes=classes[:below],
                paths=paths,
                labels=dict.fromkeys(sets, labels),
                read=reader(root, paths),
                origins=dict.fromkeys(sets, origin),
            )
        )
    return splits


def read_synsets(path: Path) -> dict[str, str]:
    """WNID -> its line of synsets.txt, in class order. The words alone are not unique: two classes are called crane."""
    synsets: dict[str, str] = {}
    for number, line in numbered_lines(path):
        match = _SYNSET.fullmatch(line)
        if match is None or match[1] in synsets:
            what = f"expected `WNID words`, found {line!r}" if match is None else f"duplicate {match[1]}"
            raise DataError(f"{path}, line {number}: {what}")
        synsets[match[1]] = line
    return synsets


def _train_files(subset: str, info: list[Path]) -> dict[Path, str | None]:
    """Training lists in order, each with the folder its paths may be relative to (None: paths must include it)."""
    if subset == _FULL and any((folder / _ALL).is_file() for folder in info):
        return {find_file(_ALL, info): None}
    folders = _TRAIN_FOLDERS if subset == _FULL else _TRAIN_FOLDERS[:1]
    return {find_file(f"train_filelist_{folder}.txt", info): folder for folder in folders}


def _relative_to_root(images: dict[str, int], path: Path, folder: str | None) -> dict[str, int]:
    """Make all paths relative to the root, so that keys are the same for every copy of the data set."""
    prefixes = tuple(f"{name}/" for name in (_TRAIN_FOLDERS if folder is None else (folder,)))
    result = {}
    for image, label in images.items():
        if not image.startswith(prefixes):
            if folder is None:
                raise DataError(
                    f"{path}: {image!r} does not start with {' or '.join(prefixes)}, so its folder is not known; "
                    f"remove this file to use the lists of {' and '.join(_TRAIN_FOLDERS)} instead"
                )
            image = f"{folder}/{image}"
        result[image] = label
    if len(result) != len(images):
        raise DataError(f"{path}: duplicates: lists images both with and without the prefix {prefixes[0]}")
    return result


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; it should contain the images")
