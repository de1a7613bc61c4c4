"""Atomic file writes (write to a temporary name, fsync, rename) and checksums."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

PART_SUFFIX = ".part"  # of a file that is still being written
_CHUNK = 1 << 20


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """Open `path` for writing. The file appears under its name only when it is complete.

    If the body raises (disk full, interrupt), the temporary file is removed and an existing file stays unchanged.
    """
    part = path.with_name(path.name + PART_SUFFIX)
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise
    sync_folder(path.parent)


def write_atomic(path: Path, content: bytes) -> None:
    """Write a small file atomically."""
    with atomic_file(path) as file:
        file.write(content)


def write_atomic_group(contents: Sequence[tuple[Path, bytes]]) -> None:
    """Write several small files of one folder, the last of which describes the others.

    All new files are on disk before an old one is removed, so nothing is lost if the disk is full. Several files cannot
    be replaced in one atomic step: the old description is removed first and the new one is added last. An interrupt in
    between leaves files without a description, but never files with the wrong description.
    """
    parts = [path.with_name(path.name + PART_SUFFIX) for path, _ in contents]
    description = contents[-1][0]
    try:
        for part, (_, content) in zip(parts, contents, strict=True):
            with part.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        description.unlink(missing_ok=True)
        for part, (path, _) in zip(parts, contents, strict=True):
            part.replace(path)
    except BaseException:
        for part in parts:
            with suppress(OSError):
                part.unlink()
        raise
    sync_folder(description.parent)


def sync_folder(folder: Path) -> None:
    """Flush `folder` to disk, so that renames in it survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, as a hexadecimal string."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
