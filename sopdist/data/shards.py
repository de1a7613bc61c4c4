"""Shards: plain WebDataset tars, each with an index file, written once and read by offset.

Stock readers can read them: the tar has `KEY.jpg` followed by `KEY.json`, and the `.idx` has the format of DALI's
wds2idx. The bytes depend only on the samples: there are no timestamps, user names or host names.
"""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, ShardError
from ..files import atomic_file, write_atomic
from .headers import FORMATS
from .manifest import ShardInfo, index_name

_BLOCK = 512
_INDEX_VERSION = "v1.2"
_RECORD = "json"


class Member(NamedTuple):
    """A sample to be written to a shard."""

    key: str
    extension: str  # of the image, one of headers.FORMATS
    image: bytes
    record: dict[str, Any]  # content of KEY.json


def write_shard(path: Path, members: Iterable[Member]) -> ShardInfo:
    """Write a tar and its index, each atomically. `first` is 0 in the result; the caller sets it.

    The tar is renamed after the index, so a tar with its final name always has an index.
    """
    digest = hashlib.sha256()
    lines: list[str] = []
    at = 0
    with atomic_file(path) as file:

        def put(content: bytes) -> None:
            nonlocal at
            file.write(content)
            digest.update(content)
            at += len(content)

        for member in members:
            record = json.dumps(member.record, ensure_ascii=False).encode()
            line = []
            for extension, content in ((member.extension, member.image), (_RECORD, record)):
                name = f"{member.key}.{extension}"
                put(_tar_header(name, len(content)))
                line.append(f"{extension} {at} {len(content)} {name}")
                put(content)
                put(b"\0" * (-len(content) % _BLOCK))
            lines.append(" ".join(line))
        if not lines:
            raise DataError(f"{path}: a shard without samples")
        put(b"\0" * (2 * _BLOCK))
        text = "\n".join([f"{_INDEX_VERSION} {len(lines)}", *lines, ""])
        write_atomic(path.with_name(index_name(path.name)), text.encode())
    return ShardInfo(path.name, first=0, samples=len(lines), bytes=at, sha256=digest.hexdigest())


def _tar_header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)  # mtime 0, user 0, mode 0644
    info.size = size
    return info.tobuf(tarfile.PAX_FORMAT)


@dataclass(frozen=True)
class ShardIndex:
    """Position of each sample of a shard in its tar; one entry per sample in every field."""

    keys: list[str]
    extensions: list[str]  # of the images
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    record_offsets: NDArray[np.int64]
    record_sizes: NDArray[np.int64]


def parse_index(text: str, where: str) -> ShardIndex:
    """Parse an `.idx`: one line per sample with `extension offset size name` of the image and of its record."""
    lines = text.splitlines()
    head = lines[0].split() if lines else []
    if len(head) != 2 or head[0] != _INDEX_VERSION or head[1] != str(len(lines) - 1):
        raise DataError(f"{where}: not a complete index ({_INDEX_VERSION}); run `sopdist verify` for details")
    rows = [line.split(" ") for line in lines[1:]]
    for number, row in enumerate(rows, start=2):
        if len(row) != 8 or row[0] not in FORMATS or row[4] != _RECORD:
            raise DataError(f"{where}, line {number}: expected an image and its json")
    try:
        numbers = np.array([(row[1], row[2], row[5], row[6]) for row in rows]).astype(np.int64).reshape(-1, 4)
    except (ValueError, OverflowError):
        raise DataError(f"{where}: an offset or a size is not an integer") from None
    return ShardIndex(
        [row[3].removesuffix(f".{row[0]}") for row in rows], [row[0] for row in rows], *np.ascontiguousarray(numbers.T)
    )


class Shard:
    """An open shard. Thread-safe: samples are read by offset, without a file position."""

    def __init__(self, folder: Path, info: ShardInfo) -> None:
        self._file = -1
        self.info = info
        self.path = folder / info.name
        index_path = folder / info.index_name
        try:
            self.index = parse_index(index_path.read_text(encoding="utf-8"), str(index_path))
            self._file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except DataError as error:
            raise ShardError(str(error)) from None
        except (OSError, UnicodeDecodeError) as error:
            raise ShardError(f"{getattr(error, 'filename', index_path)}: cannot be read: {error}") from None
        size = os.fstat(self._file).st_size
        if size != info.bytes or len(self.index.keys) != info.samples:
            self.close()
            raise ShardError(
                f"{self.path}: {size} bytes and {len(self.index.keys)} samples, the manifest says {info.bytes} and "
                f"{info.samples}; copy the shard again, or run `sopdist verify {folder}` for a full report"
            )
        for offsets, sizes in (
            (self.index.offsets, self.index.sizes),
            (self.index.record_offsets, self.index.record_sizes),
        ):
            if ((offsets < 0) | (sizes < 0) | (offsets > size) | (sizes > size - offsets)).any():
                self.close()
                raise ShardError(f"{index_path}: points outside {info.name}; run `sopdist verify {folder}`")

    def image(self, position: int) -> bytes:
        """The encoded image of the sample at `position` in the shard."""
        return self._read(self.index.offsets[position], self.index.sizes[position])

    def record(self, position: int) -> dict[str, Any]:
        """The content of the sample's KEY.json."""
        content = self._read(self.index.record_offsets[position], self.index.record_sizes[position])
        record = json.loads(content)
        if not isinstance(record, dict):
            raise DataError(f"{self.path}: {self.index.keys[position]}.json is not an object")
        return record

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __del__(self) -> None:
        self.close()

    def _read(self, offset: int, size: int) -> bytes:
        content = os.pread(self._file, size, offset)
        while len(content) < size:  # a single read returns at most 2 GiB, and less after a signal
            more = os.pread(self._file, size - len(content), offset + len(content))
            if not more:
                raise DataError(f"{self.path}: ends early; the file was truncated while it was open")
            content += more
        return content


def scan_tar(path: Path) -> Iterator[tuple[str, int, int]]:
    """(name, offset, size) of every member, read from the tar itself. Raises DataError at the first damage.

    `tarfile` mistakes a damaged header for the end of the archive. So the bytes after the last member must be zeros.
    """
    end = 0
    try:
        with tarfile.open(path, "r:") as tar:
            for info in tar:
                if not info.isreg() or info.size < 0 or info.offset < end:
                    raise DataError(f"{path}: {info.name!r} at byte {info.offset} is not a regular file")
                yield info.name, info.offset_data, info.size
                end = info.offset_data + info.size + -info.size % _BLOCK
        with path.open("rb") as file:
            file.seek(end)
            rest = file.read(2 * _BLOCK)
    except (tarfile.TarError, OSError, ValueError) as error:
        raise DataError(f"{path}: damaged tar: {error}") from None
    if rest != b"\0" * (2 * _BLOCK):
        why = "truncated" if len(rest) < 2 * _BLOCK else "neither a member nor the end of the archive"
        raise DataError(f"{path}: damaged tar: {why} at byte {end}")
