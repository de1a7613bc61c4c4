"""`manifest.json`: the shards of a split. It defines the index of each sample, which never changes.

A split is a folder of shards. Sample i is at position `i - first` of the shard whose range contains i. The index
addresses the sample's row in the noise table, its entry in every label set and its line in every report. It does not
depend on ranks, workers, seeds or epochs.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..files import write_atomic

FORMAT = 1
MANIFEST = "manifest.json"
_SHARD_NAME = re.compile(r"shard-\d{6,}\.tar")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class ShardInfo:
    """One tar of the split."""

    name: str  # shard-000123.tar
    first: int  # index of its first sample
    samples: int
    bytes: int
    sha256: str

    @property
    def index_name(self) -> str:
        """Name of the .idx file with the position of each sample in the tar."""
        return index_name(self.name)


@dataclass(frozen=True)
class Manifest:
    """All shards of a split, in index order."""

    dataset: str
    split: str
    classes: tuple[str, ...]
    shards: tuple[ShardInfo, ...]

    @cached_property
    def samples(self) -> int:
        """N, the number of samples in all shards."""
        return sum(shard.samples for shard in self.shards)

    @cached_property
    def firsts(self) -> NDArray[np.int64]:
        """Index of each shard's first sample, followed by N; (shards + 1,)."""
        return np.array([*(shard.first for shard in self.shards), self.samples], dtype=np.int64)

    @cached_property
    def digest(self) -> str:
        """Identifies the content and order of all shards. A run cannot be resumed on a split with another digest."""
        lines = "".join(f"{shard.name} {shard.samples} {shard.sha256}\n" for shard in self.shards)
        return hashlib.sha256(lines.encode()).hexdigest()

    def shard_of(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """The shard number of each sample."""
        return np.searchsorted(self.firsts, index, side="right") - 1

    def write(self, folder: Path) -> None:
        """Write `folder/manifest.json` atomically. A split is complete if and only if this file exists."""
        content = {"format": FORMAT, "samples": self.samples, "digest": self.digest, **asdict(self)}
        write_atomic(folder / MANIFEST, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())


def index_name(shard_name: str) -> str:
    """`shard-000123.tar` -> `shard-000123.idx`."""
    return shard_name.removesuffix(".tar") + ".idx"


def shard_name(number: int) -> str:
    """123 -> `shard-000123.tar`."""
    return f"shard-{number:06d}.tar"


def read_manifest(folder: Path) -> Manifest:
    """Read and check `folder/manifest.json`."""
    path = folder / MANIFEST
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise DataError(_why_missing(folder)) from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    return parse_manifest(content, str(path))


def parse_manifest(content: bytes, where: str) -> Manifest:
    """Parse a manifest and check every field; `where` names the file in errors."""
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON ({error}); prepare the split again") from None
    if not isinstance(fields, dict) or "format" not in fields:
        raise DataError(f"{where}: not a sopdist manifest")
    if fields["format"] != FORMAT:
        raise DataError(
            f"{where}: format {fields['format']!r}, this version of sopdist reads format {FORMAT}; "
            "use the version that wrote it, or prepare the split again"
        )
    try:
        manifest = Manifest(
            dataset=_text(fields, "dataset"),
            split=_text(fields, "split"),
            classes=_names(fields["classes"]),
            shards=tuple(_shard_info(shard) for shard in fields["shards"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{where}: damaged ({type(error).__name__}: {error}); prepare the split again") from None
    _check(manifest, fields, where)
    return manifest


def _check(manifest: Manifest, fields: dict[str, Any], where: str) -> None:
    """Check that the manifest is consistent."""
    if not manifest.classes or not manifest.shards:
        raise DataError(f"{where}: has no classes or no shards")
    expected = 0
    for shard in manifest.shards:
        if shard.first != expected:
            raise DataError(f"{where}: {shard.name} starts at index {shard.first}, expected {expected}")
        expected += shard.samples
    if len({shard.name for shard in manifest.shards}) != len(manifest.shards):
        raise DataError(f"{where}: lists a shard twice")
    for field in ("samples", "digest"):
        if fields.get(field) != getattr(manifest, field):
            raise DataError(
                f"{where}: {field} is {fields.get(field)!r}, but its shards give {getattr(manifest, field)!r}"
            )


def _shard_info(fields: dict[str, Any]) -> ShardInfo:
    name, sha256 = _text(fields, "name"), _text(fields, "sha256")
    if not _SHARD_NAME.fullmatch(name):
        raise ValueError(f"shard name {name!r}")  # also: no shard outside the folder
    if not _SHA256.fullmatch(sha256):
        raise ValueError(f"checksum of {name}")
    return ShardInfo(
        name, first=_count(fields, "first", 0), samples=_count(fields, "samples"), bytes=_count(fields, "bytes"),
        sha256=sha256,
    )  # fmt: skip


def _names(names: Any) -> tuple[str, ...]:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise TypeError("classes is not a list of names")
    return tuple(names)


def _text(fields: dict[str, Any], key: str) -> str:
    if not isinstance(fields[key], str):
        raise TypeError(f"{key} is not text")
    return str(fields[key])


def _count(fields: dict[str, Any], key: str, minimum: int = 1) -> int:
    value = fields[key]
    if type(value) is not int or not minimum <= value < 2**62:
        raise ValueError(f"{key} = {value!r}")
    return value


def _why_missing(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder}: no such folder"
    inside = sorted(child.parent.name for child in folder.glob(f"*/{MANIFEST}"))
    if inside:
        return f"{folder}: not a split, but a folder of splits ({', '.join(inside)}); use e.g. {folder / inside[0]}"
    if any(folder.glob("shard-*.tar")):
        return f"{folder}: has shards but no {MANIFEST}: `sopdist prepare` was interrupted; run it again to resume"
    return f"{folder}: no {MANIFEST}; `sopdist prepare` writes one"
