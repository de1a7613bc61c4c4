"""The index of a checkpoint (`checkpoint.json`) and the marker of a complete one. Validates everything it reads.

checkpoint.json   format, step, ..., fingerprint, config;
                  tensors: NAME -> dtype, shape, pieces: the fragments (file, start, stop) that form the full tensor;
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
from ..errors import DataError
from ..files import write_atomic
from . import names
from .tensor_file import DTYPES, NAMES, regular_file_size

FORMAT, FORMATS = 3, (2, 3)  # written, and read
INDEX, COMPLETE = "checkpoint.json", "complete"
_MAX_INDEX_BYTES = 256 << 20  # 512 ranks and a large network need a tenth of it
_MAX_DIMENSIONS = 64  # of a tensor; torch has the same limit
_FILE = re.compile(r"rank-([0-9]{1,6})-of-([0-9]{1,6})\.safetensors")
_MARKER = re.compile(rb"[0-9a-f]{64}\n")


@dataclass(frozen=True)
class FragmentLocation:
    """Where a fragment of a tensor is stored."""

    file: str
    name: str  # of the tensor in that file
    start: int  # first element of the full tensor, flattened
    stop: int


@dataclass(frozen=True)
class TensorInfo:
    """A tensor in a checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    fragments: tuple[FragmentLocation, ...]  # in order, without gaps

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return self.elements * self.dtype.itemsize


@dataclass(frozen=True)
class FileInfo:
    """A file in a checkpoint."""

    bytes: int
    sha256: str | None  # None in format 1, which has no checksums


@dataclass(frozen=True)
class Index:
    """Everything about a checkpoint except the tensor values."""

    format: int
    about: dict[str, Any] = field(default_factory=dict)  # step, ranks, engine, best, fingerprint, config, ...
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    files: dict[str, FileInfo] = field(default_factory=dict)


def file_of(rank: int, ranks: int) -> str:
    """Name of the file that a rank writes."""
    return f"rank-{rank}-of-{ranks}.safetensors"


def commit(folder: Path, index: Index) -> None:
    """Write the index, then the marker. The files of all ranks must be on disk."""
    content = _encode(index)
    write_atomic(folder / INDEX, content)
    write_atomic(folder / COMPLETE, hashlib.sha256(content).hexdigest().encode() + b"\n")


def read_index(folder: Path) -> Index:
    """Read and validate the index; DataError if it is damaged or malformed."""
    content, marker = read_small(folder / INDEX), read_small(folder / COMPLETE, limit=1024)
    if not _MARKER.fullmatch(marker):
        raise DataError(f"{folder / COMPLETE}: is damaged: it does not hold a checksum")
    if hashlib.sha256(content).hexdigest().encode() + b"\n" != marker:
        raise DataError(f"{folder / INDEX}: is damaged: its checksum does not match {COMPLETE}")
    try:
        tree = parse(content)
        if tree["format"] not in FORMATS:
            raise DataError(
                f"{folder}: has format {tree['format']}, this sopdist {__version__} reads up to {FORMAT}; "
                f"use the sopdist that wrote it: {tree.get('versions', {}).get('sopdist', 'a later one')}"
            )
        return _decode(tree)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise DataError(f"{folder / INDEX}: is not a checkpoint index: {type(error).__name__}: {error}") from None


def read_small(path: Path, limit: int = _MAX_INDEX_BYTES) -> bytes:
    """Read a regular file of at most `limit` bytes. Refuses links, pipes, devices and larger files."""
    try:
        # O_NOFOLLOW: do not follow a link. O_NONBLOCK: do not block on a pipe without a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            regular_file_size(path)
            content = file.read(limit + 1)
    except OSError as error:
        raise DataError(f"{path.parent}: is not a complete checkpoint: {error.strerror}: {path}") from None
    if len(content) > limit:
        raise DataError(f"{path}: is too large: more than {limit:,} bytes")
    return content


def parse(content: bytes) -> dict[str, Any]:
    """Parse strict JSON: no duplicate keys, no NaN or Infinity. Raises ValueError or RecursionError."""
    tree = json.loads(content, object_pairs_hook=_object, parse_constant=_refuse_constant)
    if not isinstance(tree, dict):
        raise ValueError("it is not a JSON object")
    return tree


def check_about(about: Mapping[str, Any]) -> None:
    """Check the metadata of a checkpoint: required keys and the types of known ones. Raises ValueError or KeyError."""
    if _count(about["ranks"]) not in range(1, 1_000_000):
        raise ValueError(f"ranks = {about['ranks']} is out of range")
    for key in ("step", "unreadable", "failed_saves"):
        _count(about.get(key, 0) if key != "step" else about[key])
    if type(about.get("best_step", -1)) is not int:
        raise ValueError(f"best_step = {about['best_step']!r} is not a step")
    scale = about.get("loss_scale", {})
    for value in (about["best"], about.get("epoch", 0), *scale.values()):
        if type(value) not in (int, float) or not math.isfinite(value):
            raise ValueError(f"{value!r} is not a finite number")
    for key in ("fingerprint", "config"):
        if not isinstance(about[key], dict):
            raise ValueError(f"{key} must be a JSON object")
    if not all(isinstance(text, str) for text in (about["engine"], *about.get("versions", {}).values())):
        raise ValueError("engine and versions must be strings")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("duplicate key")
    return found


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not a number")


def _encode(index: Index) -> bytes:
    tensors = {
        name: {
            "dtype": NAMES[info.dtype],
            "shape": list(info.shape),
            "pieces": [[part.file, part.start, part.stop] for part in info.fragments],
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
        match = _FILE.fullmatch(name)
        if not match or name != file_of(int(match[1]), tree["ranks"]) or int(match[1]) >= tree["ranks"]:
            raise ValueError(f"{name[:100]!r} is not a file name of a checkpoint of {tree['ranks']} ranks")
        if not re.fullmatch(r"[0-9a-f]{64}", info["sha256"]):
            raise ValueError(f"{name} has no checksum")
        files[name] = FileInfo(_count(info["bytes"]), info["sha256"])
    current = names.from_format_2 if tree["format"] == 2 else str
    tensors = {current(name): _tensor(name, info, files) for name, info in tree.pop("tensors").items()}
    held = dict.fromkeys(files, 0)
    for info in tensors.values():
        for fragment in info.fragments:
            held[fragment.file] += (fragment.stop - fragment.start) * info.dtype.itemsize
    for name, size in held.items():
        if size > files[name].bytes:
            raise ValueError(f"{name} has {files[name].bytes} bytes, but its tensors need {size}")
    return Index(tree.pop("format"), tree, tensors, files)


def _tensor(name: str, info: Mapping[str, Any], files: Mapping[str, FileInfo]) -> TensorInfo:
    shape = tuple(_count(size) for size in info["shape"][:_MAX_DIMENSIONS])
    if len(shape) < len(info["shape"]):
        raise ValueError(f"{name}: has more than {_MAX_DIMENSIONS} dimensions")
    _count(math.prod(max(size, 1) for size in shape))  # torch multiplies them too and must not overflow
    fragments, at = [], 0
    for file, start, stop in info["pieces"]:
        if file not in files or _count(start) != at or _count(stop) < start:
            raise ValueError(f"{name}: its fragments are not contiguous")
        fragments.append(FragmentLocation(file, name, start, stop))
        at = stop
    if at != math.prod(shape):
        raise ValueError(f"{name}: its fragments have {at} elements, its shape {list(shape)} has {math.prod(shape)}")
    return TensorInfo(DTYPES[info["dtype"]], shape, tuple(fragments))


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**53:
        raise ValueError(f"{value!r} is not a valid count")
    return value
