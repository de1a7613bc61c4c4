"""CIFAR-10 and CIFAR-100, optionally with the human labels of CIFAR-10N and CIFAR-100N: photos of 32 x 32 pixels.

Expected layout: --root contains, or is, the unpacked folder of the Python or the binary version:

  cifar-10-batches-py/     data_batch_1 to data_batch_5, test_batch, batches.meta
  cifar-10-batches-bin/    data_batch_1.bin to data_batch_5.bin, test_batch.bin, batches.meta.txt
  cifar-100-python/        train, test, meta
  cifar-100-binary/        train.bin, test.bin, fine_label_names.txt

Splits: train and test, as PNG. This module has two sources, CIFAR10 and CIFAR100, each with its own help text.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from ..labels import CLEAN, GIVEN
from .lists import find_files, read_bytes, read_names, root_of
from .source import SourceSplit, select_splits
from .unpickle import load_pickle, load_torch

_PIXELS = 3 * 32 * 32

Pixels = NDArray[np.uint8]  # (N, 3072): red, green and blue planes of 32 rows each
Labels = NDArray[np.int64]


@dataclass(frozen=True)
class _Version:
    """One of the two published versions, Python or binary."""

    folder: str
    splits: dict[str, tuple[str, ...]]  # files of each split, in order
    names: str  # file with the class names


@dataclass
class Cifar:
    """A source; the two data sets differ only in names and sizes."""

    name: str
    classes: int
    python: _Version
    binary: _Version
    labels_key: str  # key in the pickles
    names_key: str
    label_bytes: int  # bytes before the pixels of a binary record; the last one is the label
    human: dict[str, str]  # key in the CIFAR-N file -> label set
    help: str

    def __post_init__(self) -> None:
        self.__doc__ = self.help

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare --human, the file of CIFAR-N."""
        file = f"CIFAR-{self.classes}_human.pt"
        parser.add_argument(
            "--human", metavar="FILE", help=f"{file} of CIFAR-N: adds label sets {', '.join(self.human.values())}"
        )

    def find_splits(self, args: argparse.Namespace) -> list[SourceSplit]:
        """train and test."""
        wanted = select_splits(tuple(self.python.splits), args.splits)
        version, files = self._find_version(root_of(args), wanted)
        classes = self._class_names(version, files)
        splits = []
        for split in wanted:
            names = version.splits[split]
            parts = [self._read_part(version, files[name]) for name in names]
            pixels, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
            origin = {"source": self.name, "files": list(names)}
            sets, origins = {GIVEN: labels, CLEAN: labels}, {GIVEN: origin, CLEAN: origin}
            if split == "train" and args.human is not None:
                for name, (human, about) in self._read_human(Path(args.human), labels).items():
                    sets[name], origins[name] = human, about
            paths = [f"{split}/{i:05d}.png" for i in range(len(labels))]
            splits.append(SourceSplit(self.name, split, classes, paths, sets, partial(_read_png, pixels), origins))
        return splits

    def _find_version(self, root: Path, splits: list[str]) -> tuple[_Version, dict[str, Path]]:
        """The version found and the paths of its files. If both exist, Python's: pixels and labels are the same."""
        missing = []
        for version in (self.python, self.binary):
            files = [*(name for split in splits for name in version.splits[split]), version.names]
            folders = [root / version.folder, root]
            # If only some of its files are missing, report these: the user has this version.
            if any((folder / name).is_file() for folder in folders for name in files):
                return version, find_files(files, folders)
            missing.append(f"{files[0]} in {folders[0]}")
        raise DataError(f"{root}: no {self.name}; looked for {' and for '.join(missing)}, and for both in {root}")

    def _class_names(self, version: _Version, files: dict[str, Path]) -> tuple[str, ...]:
        path = files[version.names]
        if version is self.binary:
            return read_names(path, self.classes)
        names = _field(load_pickle(read_bytes(path), str(path)), self.names_key, path)
        if not isinstance(names, list) or len(names) != self.classes:
            raise DataError(f"{path}: {self.names_key} is not a list of {self.classes} names")
        return tuple(name.decode("latin1") if isinstance(name, bytes) else str(name) for name in names)

    def _read_part(self, version: _Version, path: Path) -> tuple[Pixels, Labels]:
        if version is self.binary:
            record = self.label_bytes + _PIXELS
            content = np.frombuffer(read_bytes(path), np.uint8)
            if len(content) == 0 or len(content) % record:
                raise DataError(f"{path}: {len(content)} bytes, not a multiple of {record}; download it again")
            records = content.reshape(-1, record)  # (N, label_bytes + 3072)
            return records[:, self.label_bytes :], self._check_labels(records[:, self.label_bytes - 1], str(path))
        fields = load_pickle(read_bytes(path), str(path))
        pixels = _field(fields, "data", path)
        if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.shape[1:] != (_PIXELS,):
            raise DataError(f"{path}: data is not an array of N x {_PIXELS} bytes")
        labels = self._check_labels(_field(fields, self.labels_key, path), f"{path}, {self.labels_key}")
        if len(labels) != len(pixels):
            raise DataError(f"{path}: {len(pixels)} images and {len(labels)} labels")
        return pixels, labels

    def _read_human(self, path: Path, clean: Labels) -> dict[str, tuple[Labels, dict[str, Any]]]:
        """Label sets with their origins. Labels are matched by position, so the file's clean labels must equal ours."""
        fields = load_torch(read_bytes(path), str(path))
        theirs = self._check_labels(_field(fields, "clean_label", path), f"{path}, clean_label")
        wrong = np.flatnonzero(theirs != clean) if len(theirs) == len(clean) else None
        if wrong is None or len(wrong):
            what = f"{len(theirs)} labels for {len(clean)} images" if wrong is None else f"sample {wrong[0]} differs"
            raise DataError(
                f"{path}: its clean_label does not match the training labels of {self.name} ({what}); the file belongs "
                "to another data set, or to another order of its images"
            )
        keys = [key for key in self.human if key in fields]
        if not keys:
            raise DataError(f"{path}: contains {', '.join(fields)}; expected any of {', '.join(self.human)}")
        skipped = [key for key in fields if key not in self.human and key != "clean_label"]
        if skipped:
            print(f"{path}: skipped: {', '.join(skipped)} (not labels of the {self.classes} classes)", file=sys.stderr)
        sets = {}
        for key in keys:
            labels = self._check_labels(fields[key], f"{path}, {key}")
            if len(labels) != len(clean):
                raise DataError(f"{path}, {key}: {len(labels)} labels for {len(clean)} images")
            about = {"source": "cifar-n", "file": path.name, "key": key, "noise_rate": float((labels != clean).mean())}
            sets[self.human[key]] = (labels, about)
        return sets

    def _check_labels(self, values: Any, where: str) -> Labels:
        """Check labels given as a list or an array (N,) or (N, 1)."""
        values = values.ravel().tolist() if isinstance(values, np.ndarray) else values
        if not isinstance(values, list):
            raise DataError(f"{where}: {type(values).__name__}, expected a list of labels")
        for i, value in enumerate(values):
            if type(value) is not int or not 0 <= value < self.classes:
                raise DataError(f"{where}: label {value!r} at position {i}; must be from 0 to {self.classes - 1}")
        return np.array(values, dtype=np.int64)


def _field(fields: dict[str, Any], key: str, path: Path) -> Any:
    if key not in fields:
        raise DataError(
            f"{path}: no key {key!r}, only {', '.join(fields) or 'an empty dictionary'}; is it the right file?"
        )
    return fields[key]


def _read_png(pixels: Pixels, i: int) -> bytes:
    from PIL import Image

    from ..prepare.reencode import encode_png

    planes = pixels[i].reshape(3, 32, 32)  # (channel, row, column)
    return encode_png(Image.fromarray(np.ascontiguousarray(planes.transpose(1, 2, 0))))  # (row, column, channel)


CIFAR10 = Cifar(
    name="cifar10",
    classes=10,
    python=_Version(
        "cifar-10-batches-py",
        {"train": tuple(f"data_batch_{n}" for n in range(1, 6)), "test": ("test_batch",)},
        "batches.meta",
    ),
    binary=_Version(
        "cifar-10-batches-bin",
        {"train": tuple(f"data_batch_{n}.bin" for n in range(1, 6)), "test": ("test_batch.bin",)},
        "batches.meta.txt",
    ),
    labels_key="labels",
    names_key="label_names",
    label_bytes=1,
    human={
        "aggre_label": "cifar10n-aggre",
        "worse_label": "cifar10n-worst",
        "random_label1": "cifar10n-random1",
        "random_label2": "cifar10n-random2",
        "random_label3": "cifar10n-random3",
    },
    help="""CIFAR-10: 50,000 and 10,000 photos of 32 x 32 pixels, 10 classes.

Expected layout: --root contains, or is, the unpacked folder of the Python or the binary version:

  cifar-10-batches-py/     data_batch_1 to data_batch_5, test_batch, batches.meta
  cifar-10-batches-bin/    data_batch_1.bin to data_batch_5.bin, test_batch.bin, batches.meta.txt

Splits: train and test, as PNG. Label sets: given and clean, which are identical. With --human CIFAR-10_human.pt
(CIFAR-10N), train also gets the human labels cifar10n-aggre, cifar10n-worst and cifar10n-random1 to 3. Pickles are read
by a restricted unpickler that only returns numbers, text and arrays and executes nothing.
""",
)

CIFAR100 = Cifar(
    name="cifar100",
    classes=100,
    python=_Version("cifar-100-python", {"train": ("train",), "test": ("test",)}, "meta"),
    binary=_Version("cifar-100-binary", {"train": ("train.bin",), "test": ("test.bin",)}, "fine_label_names.txt"),
    labels_key="fine_labels",
    names_key="fine_label_names",
    label_bytes=2,
    human={"noisy_label": "cifar100n-noisy"},
    help="""CIFAR-100: 50,000 and 10,000 photos of 32 x 32 pixels, 100 classes (the fine labels).

Expected layout: --root contains, or is, the unpacked folder of the Python or the binary version:

  cifar-100-python/        train, test, meta
  cifar-100-binary/        train.bin, test.bin, fine_label_names.txt

Splits: train and test, as PNG. Label sets: given and clean, which are identical. With --human CIFAR-100_human.pt
(CIFAR-100N), train also gets the human labels cifar100n-noisy; the coarse labels in that file are skipped. Pickles are
read by a restricted unpickler that only returns numbers, text and arrays and executes nothing.
""",
)
