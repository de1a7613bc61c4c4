"""ILSVRC12 validation images (ImageNet): a second test set for networks trained on WebVision.

The classes are those of WebVision, in its order: --synsets is WebVision's info/synsets.txt. The first 50 classes are
used, as in mini WebVision; --classes-count 1000 uses all. Expected layout under --root, one of

  val/n01440764/ILSVRC2012_val_00000293.JPEG       one folder per class

  val/ILSVRC2012_val_00000001.JPEG                 all in one folder (val/, ILSVRC2012_img_val/, or --root itself), with
  ILSVRC2012_devkit_t12/data/meta.mat              the development kit (or in devkit/data/, data/, or --root itself)
  ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt

  val/ILSVRC2012_val_00000001.JPEG                 all in one folder, with
  val.txt                                          ILSVRC2012_val_00000001.JPEG 65: labels by sorted WNID, from 0

One split, ilsvrc12, sorted by image name in every layout. Label sets: given and clean, which are identical.
"""

from __future__ import annotations

import argparse
import os
import re
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...errors import DataError
from ..labels import CLEAN, GIVEN
from .lists import find_files, numbered_lines, read_labelled, reader, root_of
from .source import SourceSplit
from .webvision import MINI_CLASSES, read_synsets

_DATASET, _SPLIT = "ilsvrc12-val", "ilsvrc12"
_ALL_CLASSES = 1000
_IMAGE_FOLDERS = ("val", "ILSVRC2012_img_val", ".")
_KIT_FOLDERS = ("ILSVRC2012_devkit_t12/data", "ILSVRC2012_devkit_t12", "devkit/data", "data", ".")
_META, _TRUTH, _VAL_LIST = "meta.mat", "ILSVRC2012_validation_ground_truth.txt", "val.txt"
_IMAGE, _ANY_IMAGE = "ILSVRC2012_val_{:08d}.JPEG", "ILSVRC2012_val_*.JPEG"
_WNID = re.compile(r"n\d{8}")


class _Image(NamedTuple):
    name: str
    path: str  # relative to the root
    wnid: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options that select the classes."""
    parser.add_argument(
        "--synsets", required=True, metavar="FILE", help="WebVision's info/synsets.txt: all 1000 classes, in order"
    )
    parser.add_argument(
        "--classes-count",
        type=int,
        default=MINI_CLASSES,
        metavar="N",
        help="use the first N classes of --synsets (default: %(default)s, mini WebVision)",
    )


def find_splits(args: argparse.Namespace) -> list[SourceSplit]:
    """The only split, ilsvrc12."""
    root, synsets_path, count = root_of(args), Path(args.synsets), args.classes_count
    synsets = read_synsets(synsets_path)
    if not 1 <= count <= len(synsets):
        raise DataError(f"--classes-count {count}: {synsets_path} has {len(synsets)} classes")
    class_of = {wnid: label for label, wnid in enumerate(list(synsets)[:count])}

    images, file = _find_images(root, synsets, list(class_of), synsets_path)
    images = sorted(image for image in images if image.wnid in class_of)
    if not images:
        raise DataError(f"{root}: {file} has no image of the first {count} classes of {synsets_path}")
    for one, other in pairwise(images):
        if one.name == other.name:
            raise DataError(f"{root}: {one.path} and {other.path} have the same name; remove one of them")
    labels = np.array([class_of[image.wnid] for image in images], dtype=np.int64)
    origin: dict[str, Any] = {"source": _DATASET, "file": file, "classes": count}
    return [
        SourceSplit(
            dataset=_DATASET,
            name=_SPLIT,
            classes=tuple(synsets.values())[:count],
            paths=[image.name for image in images],
            labels={GIVEN: labels, CLEAN: labels},
            read=reader(root, [image.path for image in images]),
            origins={GIVEN: origin, CLEAN: origin},
        )
    ]


def _find_images(root: Path, synsets: dict[str, str], wnids: list[str], synsets_path: Path) -> tuple[list[_Image], str]:
    """The images, at least those of the classes `wnids`, and the file or folders that define their classes."""
    for folder in _IMAGE_FOLDERS:
        if any((root / folder / wnid).is_dir() for wnid in wnids):
            return _in_class_folders(root, folder, wnids), f"{folder}/WNID"
    flat = next((folder for folder in _IMAGE_FOLDERS if any((root / folder).glob(_ANY_IMAGE))), None)
    if flat is None:
        looked = ", ".join(str(root / folder) for folder in _IMAGE_FOLDERS)
        raise DataError(f"no {_ANY_IMAGE} and no class folders such as {wnids[0]}; looked in {looked}")
    val_list = next((path for path in (root / _VAL_LIST, root / flat / _VAL_LIST) if path.is_file()), None)
    try:
        kit = find_files([_META, _TRUTH], [root / folder for folder in _KIT_FOLDERS])
    except DataError as error:
        if val_list is None:
            raise DataError(
                f"the classes of the images in {root / flat} are not known: there is no {_VAL_LIST} in {root}, and "
                f"files of the development kit are {error}"
            ) from None
        images = _by_val_list(val_list, flat, synsets, synsets_path)
        _refuse_truncated_list(root / flat, images, val_list)
        return images, _VAL_LIST
    images = _by_kit(kit[_META], kit[_TRUTH], flat, wnids)
    _refuse_truncated_list(root / flat, images, kit[_TRUTH])
    return images, _TRUTH


def _refuse_truncated_list(folder: Path, listed: list[_Image], list_path: Path) -> None:
    """Every image must be listed. Missing images are noticed when they are read, missing lines only here."""
    existing = {path.name for path in folder.glob(_ANY_IMAGE)}
    unlisted = existing - {image.name for image in listed}
    if unlisted:
        raise DataError(
            f"{list_path}: lists the classes of {len(listed):,} images, but {folder} has {len(existing):,}, and "
            f"{len(unlisted):,} of them are not listed, e.g. {min(unlisted)}; is the file truncated?"
        )


def _in_class_folders(root: Path, folder: str, wnids: list[str]) -> list[_Image]:
    missing = [wnid for wnid in wnids if not (root / folder / wnid).is_dir()]
    if missing:
        raise DataError(f"{root / folder}: {len(missing)} of {len(wnids)} class folders are missing, e.g. {missing[0]}")
    return [
        _Image(name, f"{folder}/{wnid}/{name}", wnid)
        for wnid in wnids
        for name in os.listdir(root / folder / wnid)
        if name.lower().endswith((".jpeg", ".jpg")) and not name.startswith(".")
    ]


def _by_val_list(path: Path, folder: str, synsets: dict[str, str], synsets_path: Path) -> list[_Image]:
    if len(synsets) != _ALL_CLASSES:  # a label is a position in the sorted list of all WNIDs
        raise DataError(
            f"{path} numbers the {_ALL_CLASSES} WNIDs in sorted order, but {synsets_path} has {len(synsets)}; "
            "use the full synsets.txt of WebVision"
        )
    by_wnid = sorted(synsets)
    names = ((image.split("/")[-1], label) for image, label in read_labelled(path, _ALL_CLASSES).items())
    return [_Image(name, f"{folder}/{name}", by_wnid[label]) for name, label in names]


def _by_kit(meta_path: Path, truth_path: Path, folder: str, wnids: list[str]) -> list[_Image]:
    """Read the kit's labels. It numbers classes from 1, not in the order of WNIDs; meta.mat maps numbers to WNIDs."""
    wnid_of = _read_meta(meta_path)
    unknown = set(wnids) - set(wnid_of.values())
    if unknown:
        raise DataError(f"{meta_path}: has no class {min(unknown)}, which is in --synsets; is it the kit of 2012?")
    images = []
    for number, (line, text) in enumerate(numbered_lines(truth_path), start=1):
        if line != number:  # line n belongs to image n
            raise DataError(f"{truth_path}, line {number}: blank")
        if text not in wnid_of:
            raise DataError(f"{truth_path}, line {line}: {text!r} is not the ILSVRC2012_ID of a class in {meta_path}")
        name = _IMAGE.format(number)
        images.append(_Image(name, f"{folder}/{name}", wnid_of[text]))
    return images


def _read_meta(path: Path) -> dict[str, str]:
    """ILSVRC2012_ID -> WNID of the classes, which are the synsets without children. Reading a .mat executes nothing."""
    try:
        from scipy.io import loadmat
    except ImportError:
        raise DataError(f"{path}: reading it needs SciPy: pip install 'sopdist[data]'") from None
    try:
        synsets = np.atleast_1d(loadmat(path, variable_names=["synsets"], squeeze_me=True)["synsets"])
        leaves = [synset for synset in synsets if int(synset["num_children"]) == 0]
        wnid_of = {str(int(leaf["ILSVRC2012_ID"])): str(leaf["WNID"]) for leaf in leaves}
    except Exception as error:  # a damaged .mat can raise anything
        raise DataError(f"{path}: not the meta.mat of the kit ({type(error).__name__}: {error})") from None
    if not all(map(_WNID.fullmatch, wnid_of.values())) or not len(set(wnid_of.values())) == len(wnid_of) == len(leaves):
        raise DataError(f"{path}: an ILSVRC2012_ID or a WNID is invalid or occurs twice")
    return wnid_of
