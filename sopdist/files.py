"""Files that are either whole or absent: written under another name, flushed, then renamed. And their checksums."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

PART_SUFFIX = ".part"  # what a file is called until it is whole
_CHUNK = 1 << 20


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """Open `path` for writing so that it appears complete or not at all.

    If the body raises (a full disk, an interrupt), nothing is left behind and an older file stays as it was.
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


def write_whole(path: Path, content: bytes) -> None:
    """Write a small file so that it appears complete or not at all."""
    with whole_file(path) as file:
        file.write(content)


def write_together(contents: Sequence[tuple[Path, bytes]]) -> None:
    """Write small files of one folder of which the last describes the others. All are on the disk before an old one
    goes, so a full disk costs nothing.

    Several files cannot be replaced at once. The old description goes away first and the new one comes last, so that an
    interrupt in between leaves files without one, and never with one that is not theirs.
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
    """Make renames in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """The file's SHA-256, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
