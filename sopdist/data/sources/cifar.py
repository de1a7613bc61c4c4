"""CIFAR-10 and CIFAR-100, and the labels that people gave them (CIFAR-10N, CIFAR-100N): small photographs, 32 x 32.

Expected under --root, or in it, is the folder that the download unpacks to, of the Python or of the binary version:

  cifar-10-batches-py/     data_batch_1 to data_batch_5, test_batch, batches.meta
  cifar-10-batches-bin/    data_batch_1.bin to data_batch_5.bin, test_batch.bin, batches.meta.txt
  cifar-100-python/        train, test, meta
  cifar-100-binary/        train.bin, test.bin, fine_label_names.txt

Splits: train and test, as PNG. What is here are two sources, CIFAR10 and CIFAR100; each has its own help.
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

from ..errors import DataError
from ..labels import CLEAN, GIVEN
from .lists import content_of, find_files, read_names, root_of
from .source import SourceSplit, asked_for
from .unpickle import load_pickle, load_torch

_PIXELS = 3 * 32 * 32

Pixels = NDArray[np.uint8]  # (N, 3072): red, green and blue planes of 32 rows each
Labels = NDArray[np.int64]


@dataclass(frozen=True)
class _Version:
    """One of the two ways in which it is published."""

    folder: str
    splits: dict[str, tuple[str, ...]]  # the files of each split, in order
    names: str  # the file with the names of the classes


@dataclass
class Cifar:
    """A source; the two data sets differ in names and numbers only."""

    name: str
    classes: int
    python: _Version
    binary: _Version
    labels_key: str  # in the pickles
    names_key: str
    label_bytes: int  # before the pixels of a binary record; the last is the label
    human: dict[str, str]  # key in the CIFAR-N file -> name of the label set
    help: str

    def __post_init__(self) -> None:
        self.__doc__ = self.help

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """The file with people's labels."""
        file = f"CIFAR-{self.classes}_human.pt"
        parser.add_argument(
            "--human", metavar="FILE", help=f"{file} of CIFAR-N: adds label sets {', '.join(self.human.values())}"
        )

    def find_splits(self, args: argparse.Namespace) -> list[SourceSplit]:
        """train and test."""
        wanted = asked_for(tuple(self.python.splits), args.splits)
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
                for name, (people, about) in self._read_human(Path(args.human), labels).items():
                    sets[name], origins[name] = people, about
            paths = [f"{split}/{number:05d}.png" for number in range(len(labels))]
            splits.append(SourceSplit(self.name, split, classes, paths, sets, partial(_read_png, pixels), origins))
        return splits

    def _find_version(self, root: Path, splits: list[str]) -> tuple[_Version, dict[str, Path]]:
        """The version that is there, and where its files are. With both, Python's: pixels and labels are the same."""
        complaints = []
        for version in (self.python, self.binary):
            files = [*(name for split in splits for name in version.splits[split]), version.names]
            folders = [root / version.folder, root]
            # If only some files are missing, it is this version that someone has to complete.
            if any((folder / name).is_file() for folder in folders for name in files):
                return version, find_files(files, folders)
            complaints.append(f"{files[0]} in {folders[0]}")
        raise DataError(f"{root}: no {self.name}; looked for {' and for '.join(complaints)}, and for both in {root}")

    def _class_names(self, version: _Version, files: dict[str, Path]) -> tuple[str, ...]:
        path = files[version.names]
        if version is self.binary:
            return read_names(path, self.classes)
        names = _field(load_pickle(content_of(path), str(path)), self.names_key, path)
        if not isinstance(names, list) or len(names) != self.classes:
            raise DataError(f"{path}: {self.names_key} is not a list of {self.classes} names")
        return tuple(name.decode("latin1") if isinstance(name, bytes) else str(name) for name in names)

    def _read_part(self, version: _Version, path: Path) -> tuple[Pixels, Labels]:
        if version is self.binary:
            record = self.label_bytes + _PIXELS
            content = np.frombuffer(content_of(path), np.uint8)
            if len(content) == 0 or len(content) % record:
                raise DataError(f"{path}: {len(content)} bytes, not a multiple of {record}; download it again")
            records = content.reshape(-1, record)  # (N, label_bytes + 3072)
            return records[:, self.label_bytes :], self._check_labels(records[:, self.label_bytes - 1], str(path))
        fields = load_pickle(content_of(path), str(path))
        pixels = _field(fields, "data", path)
        if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.shape[1:] != (_PIXELS,):
            raise DataError(f"{path}: data is not an array of N x {_PIXELS} bytes")
        labels = self._check_labels(_field(fields, self.labels_key, path), f"{path}, {self.labels_key}")
        if len(labels) != len(pixels):
            raise DataError(f"{path}: {len(pixels)} images and {len(labels)} labels")
        return pixels, labels

    def _read_human(self, path: Path, clean: Labels) -> dict[str, tuple[Labels, dict[str, Any]]]:
        """Label sets, each with where it comes from. They are by place, so the file's truth must be ours."""
        fields = load_torch(content_of(path), str(path))
        truth = self._check_labels(_field(fields, "clean_label", path), f"{path}, clean_label")
        wrong = np.flatnonzero(truth != clean) if len(truth) == len(clean) else None
        if wrong is None or len(wrong):
            what = f"{len(truth)} labels for {len(clean)} images" if wrong is None else f"sample {wrong[0]} differs"
            raise DataError(
                f"{path}: its clean_label is not that of {self.name}'s training images ({what}), so the file belongs "
                "to another data set or another order of it"
            )
        keys = [key for key in self.human if key in fields]
        if not keys:
            raise DataError(f"{path}: has {', '.join(fields)}; expected any of {', '.join(self.human)}")
        skipped = [key for key in fields if key not in self.human and key != "clean_label"]
        if skipped:
            print(f"{path}: not labels of the {self.classes} classes, skipped: {', '.join(skipped)}", file=sys.stderr)
        sets = {}
        for key in keys:
            labels = self._check_labels(fields[key], f"{path}, {key}")
            if len(labels) != len(clean):
                raise DataError(f"{path}, {key}: {len(labels)} labels for {len(clean)} images")
            about = {"source": "cifar-n", "file": path.name, "key": key, "noise_rate": float((labels != clean).mean())}
            sets[self.human[key]] = (labels, about)
        return sets

    def _check_labels(self, values: Any, where: str) -> Labels:
        """A list or an array (N,) or (N, 1) of classes."""
        values = values.ravel().tolist() if isinstance(values, np.ndarray) else values
        if not isinstance(values, list):
            raise DataError(f"{where}: {type(values).__name__}, expected a list of labels")
        for place, value in enumerate(values):
            if type(value) is not int or not 0 <= value < self.classes:
                raise DataError(f"{where}: label {value!r} at place {place}; allowed are 0 to {self.classes - 1}")
        return np.array(values, dtype=np.int64)


def _field(fields: dict[str, Any], key: str, path: Path) -> Any:
    if key not in fields:
        raise DataError(f"{path}: has no {key!r}, only {', '.join(fields) or 'nothing'}; is it the right file?")
    return fields[key]


def _read_png(pixels: Pixels, number: int) -> bytes:
    from PIL import Image

    from ..prepare.reencode import encode_png

    planes = pixels[number].reshape(3, 32, 32)  # (channel, row, column)
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
    help="""CIFAR-10: 50,000 and 10,000 photographs of 32 x 32 pixels, 10 classes.

Expected under --root, or --root is that folder, is the Python or the binary version as it unpacks:

  cifar-10-batches-py/     data_batch_1 to data_batch_5, test_batch, batches.meta
  cifar-10-batches-bin/    data_batch_1.bin to data_batch_5.bin, test_batch.bin, batches.meta.txt

Splits: train and test, as PNG. Label sets: given and clean, the same. With --human CIFAR-10_human.pt (CIFAR-10N) train
also gets cifar10n-aggre, cifar10n-worst and cifar10n-random1 to 3, what people said. Pickles are read by code that can
make numbers and text of them and nothing else.
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
    help="""CIFAR-100: 50,000 and 10,000 photographs of 32 x 32 pixels, 100 classes (the fine labels).

Expected under --root, or --root is that folder, is the Python or the binary version as it unpacks:

  cifar-100-python/        train, test, meta
  cifar-100-binary/        train.bin, test.bin, fine_label_names.txt

Splits: train and test, as PNG. Label sets: given and clean, the same. With --human CIFAR-100_human.pt (CIFAR-100N)
train also gets cifar100n-noisy, what people said; the coarse labels of that file are skipped. Pickles are read by code
that can make numbers and text of them and nothing else.
""",
)
