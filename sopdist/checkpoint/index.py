"""`checkpoint.json`: what is in a checkpoint; and the marker that says that it is complete. Trusts nothing it reads.

checkpoint.json   format, step, ..., fingerprint, config;
                  tensors: NAME -> dtype, shape, pieces (file, start, stop), together the whole tensor;
                  files: NAME -> bytes, sha256
complete          the SHA-256 of checkpoint.json; written last
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..data.errors import DataError
from ..files import write_whole
from .tensor_file import DTYPES, NAMES, plain_size

FORMAT = 2
INDEX, COMPLETE = "checkpoint.json", "complete"
_LARGEST_INDEX = 256 << 20  # bytes; 512 ranks and a large network need a tenth of it
_MOST_DIMENSIONS = 64  # of a tensor, as torch has it
_FILE = re.compile(r"rank-([0-9]{1,6})-of-([0-9]{1,6})\.safetensors")
_MARKER = re.compile(rb"[0-9a-f]{64}\n")


@dataclass(frozen=True)
class Place:
    """Where a piece of a tensor is."""

    file: str
    name: str  # of the tensor in that file
    start: int  # elements of the whole tensor
    stop: int


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Place, ...]  # in order, without gaps

    @property
    def elements(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """How large it is."""
        return self.elements * self.dtype.itemsize


@dataclass(frozen=True)
class FileInfo:
    """A file of a checkpoint."""

    bytes: int
    sha256: str | None  # None: of a format that had no checksums


@dataclass(frozen=True)
class Index:
    """All about a checkpoint but the tensors themselves."""

    format: int
    about: dict[str, Any] = field(default_factory=dict)  # step, ranks, engine, best, fingerprint, config, ...
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    files: dict[str, FileInfo] = field(default_factory=dict)


def file_of(rank: int, ranks: int) -> str:
    """The name of the file that a rank writes."""
    return f"rank-{rank}-of-{ranks}.safetensors"


def commit(folder: Path, index: Index) -> None:
    """All ranks' files are on the disk: write what they are, and then that they are complete."""
    content = _encode(index)
    write_whole(folder / INDEX, content)
    write_whole(folder / COMPLETE, hashlib.sha256(content).hexdigest().encode() + b"\n")


def read_index(folder: Path) -> Index:
    """Read and check it; DataError if it is damaged, or not what this program writes."""
    content, marker = read_small(folder / INDEX), read_small(folder / COMPLETE, most=1024)
    if not _MARKER.fullmatch(marker):
        raise DataError(f"{folder / COMPLETE}: is damaged: it is not a checksum")
    if hashlib.sha256(content).hexdigest().encode() + b"\n" != marker:
        raise DataError(f"{folder / INDEX}: is damaged: its checksum is not the one in {COMPLETE}")
    try:
        tree = parse(content)
        if tree["format"] != FORMAT:
            raise DataError(
                f"{folder}: has format {tree['format']}, this sopdist {__version__} reads up to {FORMAT}; "
                f"go on with the sopdist that wrote it: {tree.get('versions', {}).get('sopdist', 'a later one')}"
            )
        return _decode(tree)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise DataError(
            f"{folder / INDEX}: is not the index of a checkpoint: {type(error).__name__}: {error}"
        ) from None


def read_small(path: Path, most: int = _LARGEST_INDEX) -> bytes:
    """A file that can only be small, and must be a plain one: nothing is read that has no end, or is elsewhere."""
    try:
        # Not to follow a link, and not to wait for somebody to write into a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            plain_size(path)
            content = file.read(most + 1)
    except OSError as error:
        raise DataError(f"{path.parent}: is not a complete checkpoint: {error.strerror}: {path}") from None
    if len(content) > most:
        raise DataError(f"{path}: is larger than any such file of a checkpoint")
    return content


def parse(content: bytes) -> dict[str, Any]:
    """JSON that says one thing only: no key twice, and no number that is none. ValueError, or RecursionError."""
    tree = json.loads(content, object_pairs_hook=_object, parse_constant=_no_number)
    if not isinstance(tree, dict):
        raise ValueError("it is no object")
    return tree


def check_about(about: Mapping[str, Any]) -> None:
    """What every checkpoint must say of itself, and what of the rest is a number or text."""
    if _count(about["ranks"]) not in range(1, 1_000_000):
        raise ValueError(f"{about['ranks']} ranks")
    for key in ("step", "unreadable", "failed_saves"):
        _count(about.get(key, 0) if key != "step" else about[key])
    if type(about.get("best_step", -1)) is not int:
        raise ValueError(f"best_step = {about['best_step']!r} is no step")
    scale = about.get("loss_scale", {})
    for value in (about["best"], about.get("epoch", 0), *scale.values()):
        if type(value) not in (int, float) or not math.isfinite(value):
            raise ValueError(f"{value!r} is no number")
    for key in ("fingerprint", "config"):
        if not isinstance(about[key], dict):
            raise ValueError(f"{key} must be there")
    if not all(isinstance(text, str) for text in (about["engine"], *about.get("versions", {}).values())):
        raise ValueError("engine and versions must be text")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is there twice")
    return found


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number")


def _encode(index: Index) -> bytes:
    tensors = {
        name: {
            "dtype": NAMES[info.dtype],
            "shape": list(info.shape),
            "pieces": [[piece.file, piece.start, piece.stop] for piece in info.pieces],
        }
        for name, info in index.tensors.items()
    }
    files = {name: {"bytes": info.bytes, "sha256": info.sha256} for name, info in index.files.items()}
    tree = {"format": index.format, **index.about, "tensors": tensors, "files": files}
    return json.dumps(tree, indent=1, allow_nan=False).encode() + b"\n"


def _decode(tree: dict[str, Any]) -> Index:
    check_about(tree)
    files = {}
    for name, info in tree.pop("files").items():
        number = _FILE.fullmatch(name)
        if not number or name != file_of(int(number[1]), tree["ranks"]) or int(number[1]) >= tree["ranks"]:
            raise ValueError(f"{name[:100]!r} is no name of a file of a checkpoint of {tree['ranks']} ranks")
        if not re.fullmatch(r"[0-9a-f]{64}", info["sha256"]):
            raise ValueError(f"{name} has no checksum")
        files[name] = FileInfo(_count(info["bytes"]), info["sha256"])
    tensors = {name: _tensor(name, info, files) for name, info in tree.pop("tensors").items()}
    held = dict.fromkeys(files, 0)
    for info in tensors.values():
        for piece in info.pieces:
            held[piece.file] += (piece.stop - piece.start) * info.dtype.itemsize
    for name, size in held.items():
        if size > files[name].bytes:
            raise ValueError(f"{name} has {files[name].bytes} bytes, but {size} bytes of tensors")
    return Index(tree.pop("format"), tree, tensors, files)


def _tensor(name: str, info: Mapping[str, Any], files: Mapping[str, FileInfo]) -> TensorInfo:
    shape = tuple(_count(size) for size in info["shape"][:_MOST_DIMENSIONS])
    if len(shape) < len(info["shape"]):
        raise ValueError(f"{name}: has more than {_MOST_DIMENSIONS} dimensions")
    _count(math.prod(max(size, 1) for size in shape))  # torch multiplies them, too, and must not overflow
    pieces, at = [], 0
    for file, start, stop in info["pieces"]:
        if file not in files or _count(start) != at or _count(stop) < start:
            raise ValueError(f"{name}: the pieces do not fit together")
        pieces.append(Place(file, name, start, stop))
        at = stop
    if at != math.prod(shape):
        raise ValueError(f"{name}: the pieces have {at} elements, its shape {list(shape)} has {math.prod(shape)}")
    return TensorInfo(DTYPES[info["dtype"]], shape, tuple(pieces))


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**53:
        raise ValueError(f"{value!r} is no count")
    return value
