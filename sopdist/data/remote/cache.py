"""A size-limited folder of files, shared by several processes. It is independent of the network."""

from __future__ import annotations

import fcntl
import io
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from ...errors import DataError
from ...files import PART_SUFFIX
from ..labels import FOLDER as LABELS

_GRACE = 1.0  # seconds after its last use in which a file is not evicted, so that the caller can still open it
_SPLIT_FOLDER = re.compile(r"[0-9a-f]{16}")
_SUFFIXES = (".tar", ".idx", ".npy", ".json", PART_SUFFIX)


class NoRoomError(Exception):
    """The cache is full, and none of its files may be evicted."""


@dataclass
class Entry:
    """Files that belong together: a shard and its index, a label set and its description."""

    paths: list[Path] = field(default_factory=list)
    bytes: int = 0
    last_use: float = 0.0
    incomplete: bool = False


class Cache:
    """A folder of files, shared by several processes, whose total size never exceeds the limit.

    The folder is changed only under its lock (`locked`). A file gets its name when it is complete. Until then it is
    called NAME.part, is locked by its writer and already has its final length, so that file sizes also serve as
    reservations. A process that needs a file holds a shared lock on it. All locks are released when their process
    exits, so a .part file without a lock was left by a process that died.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self.evictions = 0
        self.evicted_in_use = 0  # of these, files that were still held
        try:
            with self.locked():
                self.scan()
        except OSError as error:
            raise DataError(f"{folder}: cannot be used as a cache: {error.strerror}; choose another folder") from None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Exclusive access to the folder, among all threads and processes. Hold it only briefly."""
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            release(lock)

    # Call the methods from here to `count_fetchers` under `locked`.

    def scan(self) -> dict[Path, Entry]:
        """All entries, by path without suffix. Removes incomplete files of dead processes."""
        entries: dict[Path, Entry] = {}
        # Other folders and files do not belong to the cache: they are neither counted nor touched.
        splits = [folder for folder in self.folder.iterdir() if _SPLIT_FOLDER.fullmatch(folder.name)]
        folders = [folder for split in splits for folder in (split, split / LABELS) if folder.is_dir()]
        for path in (path for folder in folders for path in folder.iterdir() if path.suffix in _SUFFIXES):
            incomplete = path.suffix == PART_SUFFIX
            if incomplete and _is_unlocked(path):
                path.unlink(missing_ok=True)
            with suppress(FileNotFoundError):
                found = path.stat()
                final = path.with_suffix("") if incomplete else path
                entry = entries.setdefault(final.with_suffix(""), Entry())
                entry.paths.append(path)
                entry.bytes += found.st_size
                entry.last_use = max(entry.last_use, found.st_mtime)
                entry.incomplete |= incomplete
        return entries

    def make_room(self, entries: dict[Path, Entry], target: int, expendable: Sequence[Path] | None) -> int:
        """Evict entries until at most `target` bytes are left, if possible. Returns how many bytes are left.

        Entries that are not held are evicted first, in order of last use. If a caller waits for the room, `expendable`
        is not None: these files follow, in order, and finally files that other processes hold, newest first, since
        processes download files in the order in which they need them.
        """
        left = sum(entry.bytes for entry in entries.values())
        now = time.time()
        settled = {path: entry for path, entry in entries.items() if not 0 <= now - entry.last_use < _GRACE}
        by_age = sorted(settled.values(), key=lambda entry: entry.last_use)
        for entry in by_age:
            if left > target and all(map(_is_unlocked, entry.paths)):
                left -= self._evict(entry)
        if left <= target or expendable is None:
            return left
        own = [settled[path.with_suffix("")] for path in expendable if path.with_suffix("") in settled]
        for entry in (*own, *reversed(by_age)):
            if left > target and entry.bytes and not entry.incomplete:
                left -= self._evict(entry)
                self.evicted_in_use += 1
        return left

    def _evict(self, entry: Entry) -> int:
        for path in sorted(entry.paths, reverse=True):  # the .tar first: without it, the shard counts as missing
            path.unlink(missing_ok=True)
        self.evictions += 1
        freed, entry.bytes = entry.bytes, 0
        return freed

    def reserve(self, path: Path, size: int, expendable: Sequence[Path] | None) -> io.FileIO | None:
        """Make room for `path` and open it for writing. None if another thread or process is already writing it."""
        part = path.with_name(path.name + PART_SUFFIX)
        entries = self.scan()
        if part.exists():
            return None
        if self.make_room(entries, self.limit - size, expendable) + size > self.limit:
            raise NoRoomError
        part.parent.mkdir(parents=True, exist_ok=True)
        file = io.FileIO(part, "x")  # unbuffered, so that a full disk raises at once
        fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(size)
        return file

    def hold(self, path: Path, size: int) -> int | None:
        """Protect a complete file from eviction until the returned descriptor is released. None if there is no file."""
        try:
            held = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        fcntl.flock(held, fcntl.LOCK_SH)
        if os.fstat(held).st_size == size:
            return held
        release(held)
        return None

    def count_fetchers(self) -> int:
        """How many stores prefetch into this cache."""
        markers = list(self.folder.glob("fetching-*"))
        for marker in (dead := [marker for marker in markers if _is_unlocked(marker)]):
            marker.unlink(missing_ok=True)
        return len(markers) - len(dead)

    def register_fetcher(self) -> IO[bytes]:
        """Be counted by `count_fetchers` until the returned file is closed."""
        with self.locked():
            marker = tempfile.NamedTemporaryFile(dir=self.folder, prefix="fetching-")  # noqa: SIM115 - closed by close()
            fcntl.flock(marker, fcntl.LOCK_EX)
            return marker

    def complete(self, file: io.FileIO, path: Path, write: Callable[[io.FileIO], None]) -> int:
        """Let `write` fill and sync the file opened by `reserve`, then rename it. Returns it held, as `hold` does."""
        try:
            write(file)
            with self.locked():
                os.replace(str(file.name), path)
                fcntl.flock(file, fcntl.LOCK_SH)
                return os.dup(file.fileno())  # keeps the lock
        except BaseException:
            with suppress(OSError):
                os.unlink(str(file.name))
            raise
        finally:
            file.close()

    def mark_used(self, held: int, size: int, paths: Sequence[Path]) -> bool:
        """Update the time of last use of these files. False if one was evicted or truncated although it was held."""
        with self.locked(), suppress(FileNotFoundError):
            for path in paths:
                os.utime(path)
            found = os.fstat(held)
            return found.st_nlink > 0 and found.st_size == size
        return False


def release(held: int) -> None:
    """Unlock and close. Unlock explicitly, because a forked child may also have the descriptor."""
    fcntl.flock(held, fcntl.LOCK_UN)
    os.close(held)


def _is_unlocked(path: Path) -> bool:
    """Whether no process holds a lock on the file."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
