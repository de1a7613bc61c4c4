"""Clothing1M: a million photos of clothes from online shops, labelled from the surrounding text. 14 classes.

Expected layout under --root (the .txt files directly in it, or in annotations/):

  category_names_eng.txt        14 class names, one per line
  noisy_label_kv.txt            images/0/51/1234,5678.jpg 3
  clean_label_kv.txt            the same, labelled by humans
  noisy_train_key_list.txt      images/0/51/1234,5678.jpg
  clean_train_key_list.txt, clean_val_key_list.txt, clean_test_key_list.txt
  images/...                    with any subfolders; --root may also be the images folder itself

Splits: train (noisy_train_key_list.txt, in its order), clean_train, val, test. Label sets: given and clean. In train,
clean is known only for the images that humans also labelled, and is -1 for all others.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from ..labels import CLEAN, GIVEN, UNKNOWN
from .lists import find_files, read_labelled, read_names, read_paths, reader, root_of
from .source import SourceSplit, select_splits

CLASSES = 14
_DATASET = "clothing1m"
_IMAGES = "images"
_NAMES, _NOISY, _CLEAN = "category_names_eng.txt", "noisy_label_kv.txt", "clean_label_kv.txt"
_KEY_LISTS = {
    "train": "noisy_train_key_list.txt",
    "clean_train": "clean_train_key_list.txt",
    "val": "clean_val_key_list.txt",
    "test": "clean_test_key_list.txt",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No options of its own."""


def find_splits(args: argparse.Namespace) -> list[SourceSplit]:
    """train, clean_train, val and test."""
    root = root_of(args)
    names = select_splits(tuple(_KEY_LISTS), args.splits)
    kv_of = {name: _NOISY if name == "train" else _CLEAN for name in names}
    kv_names = dict.fromkeys((*kv_of.values(), _CLEAN))  # some training images also have a clean label
    files = _find_lists(root, (_NAMES, *kv_names, *(_KEY_LISTS[name] for name in names)))
    classes = read_names(files[_NAMES], CLASSES)
    labels_in = {kv: read_labelled(files[kv], CLASSES) for kv in kv_names}
    clean = labels_in[_CLEAN]

    lists = {name: read_paths(files[_KEY_LISTS[name]]) for name in names}
    drop = _prefix_to_drop(root, lists[names[0]])
    splits = []
    for name, lines in lists.items():
        kv = kv_of[name]
        given = _labels_of(lines, labels_in[kv], files[_KEY_LISTS[name]], files[kv])
        labels = {GIVEN: given}
        origins: dict[str, dict[str, Any]] = {GIVEN: {"source": _DATASET, "file": kv}}
        cleaned = np.fromiter((clean.get(path, UNKNOWN) for path in lines), np.int64, len(lines))
        known = cleaned != UNKNOWN
        if known.any():
            labels[CLEAN] = cleaned
            origins[CLEAN] = {"source": _DATASET, "file": _CLEAN, "known": int(known.sum())}
            if name == "train":
                origins[GIVEN]["noise_rate_where_known"] = float((given != cleaned)[known].mean())
        paths = list(lines)
        splits.append(SourceSplit(_DATASET, name, classes, paths, labels, reader(root, paths, drop), origins))
    return splits


def _labels_of(lines: dict[str, int], label_of: dict[str, int], list_path: Path, kv_path: Path) -> NDArray[np.int64]:
    try:
        return np.fromiter((label_of[path] for path in lines), np.int64, len(lines))
    except KeyError as error:
        path = error.args[0]
        raise DataError(f"{list_path}, line {lines[path]}: {path!r} has no label in {kv_path}") from None


def _find_lists(root: Path, names: Sequence[str]) -> dict[str, Path]:
    folders = [root, root / "annotations"]
    if root.name == _IMAGES:  # --root is the images folder itself: the lists may be next to it
        folders += [root.parent, root.parent / "annotations"]
    try:
        return find_files(names, folders)
    except DataError as error:
        split_folders = [name for name in ("noisy_train", *_KEY_LISTS) if (root / name).is_dir()]
        if not split_folders:
            raise DataError(f"{root}: {error}") from None
        raise DataError(
            f"{root}: a copy of Clothing1M sorted into folders ({', '.join(split_folders)}), without the annotation "
            "files. These define the order of the images and which images have both labels, so the folders cannot "
            f"replace them; get the .txt files and images/ of the original data set. {error}"
        ) from None


def _prefix_to_drop(root: Path, lines: dict[str, int]) -> str:
    """Prefix of listed paths (images/) that is not on disk because --root is the images folder; else empty.

    Decided once, not for each file.
    """
    if (root / _IMAGES).is_dir():
        return ""
    prefix = f"{_IMAGES}/"
    tops = {path.removeprefix(prefix).split("/", 1)[0] for path in lines}
    if any((root / top).exists() for top in tops):
        return prefix
    raise DataError(
        f"{root}: no images: there is neither a folder {root / _IMAGES} nor, if --root is the images folder itself, "
        f"{root / min(tops)}"
    )
