"""A folder of files that many processes share and that never holds more bytes than its limit. It knows no network."""

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

from ...files import PART_SUFFIX
from ..errors import DataError
from ..labels import FOLDER as LABELS

_GRACE = 1.0  # seconds after its last use in which a file stays, so that whoever was told of it can open it
_SPLIT_FOLDER = re.compile(r"[0-9a-f]{16}")
_SUFFIXES = (".tar", ".idx", ".npy", ".json", PART_SUFFIX)


class NoRoomError(Exception):
    """The cache is full of files that must stay."""


@dataclass
class Entry:
    """Files that go together: a shard and its index, a label set and its description."""

    paths: list[Path] = field(default_factory=list)
    bytes: int = 0
    last_use: float = 0.0
    arriving: bool = False


class Cache:
    """A folder of files that many processes share, never of more bytes than the limit.

    It changes only under its lock (`changing`). A file has its name once it is whole. Before, it is NAME.part: locked
    by whoever writes it, and from the start as long as it is going to be, so that sizes in the folder are also
    reservations. Whoever needs a file to stay holds a shared lock on it. All locks end with their process, so a .part
    without one was left by a process that died.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self.evictions = 0
        self.dropped = 0  # of these, files that somebody still held
        try:
            with self.changing():
                self.survey()
        except OSError as error:
            raise DataError(f"{folder}: cannot be a cache: {error.strerror}; choose another folder") from None

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Be the only one, of all threads and processes, that looks at the folder or changes it. Never for long."""
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            release(lock)

    # The methods from here to `fetching` are called under `changing`.

    def survey(self) -> dict[Path, Entry]:
        """What is there, by path without suffix. Clears away what dead processes left."""
        entries: dict[Path, Entry] = {}
        # Other folders and files are not ours: neither counted nor touched.
        splits = [folder for folder in self.folder.iterdir() if _SPLIT_FOLDER.fullmatch(folder.name)]
        folders = [folder for split in splits for folder in (split, split / LABELS) if folder.is_dir()]
        for path in (path for folder in folders for path in folder.iterdir() if path.suffix in _SUFFIXES):
            arriving = path.suffix == PART_SUFFIX
            if arriving and _is_free(path):
                path.unlink(missing_ok=True)
            with suppress(FileNotFoundError):
                found = path.stat()
                whole = path.with_suffix("") if arriving else path
                entry = entries.setdefault(whole.with_suffix(""), Entry())
                entry.paths.append(path)
                entry.bytes += found.st_size
                entry.last_use = max(entry.last_use, found.st_mtime)
                entry.arriving |= arriving
        return entries

    def make_room(self, entries: dict[Path, Entry], most: int, expendable: Sequence[Path] | None) -> int:
        """Evict until no more than `most` bytes are left, as far as possible; returns how many are left.

        What nobody holds goes, by last use. If somebody is waiting, `expendable` (in order) goes next, and last what
        other processes hold: the newest first, since they fetch in the order in which they will need it.
        """
        left = sum(entry.bytes for entry in entries.values())
        now = time.time()
        settled = {path: entry for path, entry in entries.items() if not 0 <= now - entry.last_use < _GRACE}
        by_age = sorted(settled.values(), key=lambda entry: entry.last_use)
        for entry in by_age:
            if left > most and all(map(_is_free, entry.paths)):
                left -= self._evict(entry)
        if left <= most or expendable is None:
            return left
        own = [settled[path.with_suffix("")] for path in expendable if path.with_suffix("") in settled]
        for entry in (*own, *reversed(by_age)):
            if left > most and entry.bytes and not entry.arriving:
                left -= self._evict(entry)
                self.dropped += 1
        return left

    def _evict(self, entry: Entry) -> int:
        for path in sorted(entry.paths, reverse=True):  # the .tar first: without it, the shard counts as gone
            path.unlink(missing_ok=True)
        self.evictions += 1
        freed, entry.bytes = entry.bytes, 0
        return freed

    def begin(self, path: Path, size: int, expendable: Sequence[Path] | None) -> io.FileIO | None:
        """Make room for `path` and open it for writing; None if somebody is writing it already."""
        part = path.with_name(path.name + PART_SUFFIX)
        entries = self.survey()
        if part.exists():
            return None
        if self.make_room(entries, self.limit - size, expendable) + size > self.limit:
            raise NoRoomError
        part.parent.mkdir(parents=True, exist_ok=True)
        file = io.FileIO(part, "x")  # no buffer: a full disk is told of at once
        fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(size)
        return file

    def hold(self, path: Path, size: int) -> int | None:
        """Keep a whole file from being evicted: a descriptor to be released, or None if it is not there."""
        try:
            held = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        fcntl.flock(held, fcntl.LOCK_SH)
        if os.fstat(held).st_size == size:
            return held
        release(held)
        return None

    def fetching(self) -> int:
        """How many stores fetch ahead into this cache."""
        signs = list(self.folder.glob("fetching-*"))
        for sign in (dead := [sign for sign in signs if _is_free(sign)]):
            sign.unlink(missing_ok=True)
        return len(signs) - len(dead)

    def announce(self) -> IO[bytes]:
        """Count in `fetching` until the result is closed."""
        with self.changing():
            sign = tempfile.NamedTemporaryFile(dir=self.folder, prefix="fetching-")  # noqa: SIM115 - closed by close()
            fcntl.flock(sign, fcntl.LOCK_EX)
            return sign

    def complete(self, file: io.FileIO, path: Path, write: Callable[[io.FileIO], None]) -> int:
        """Let `write` fill what `begin` opened, down to the disk, then give it its name; returns it held."""
        try:
            write(file)
            with self.changing():
                os.replace(str(file.name), path)
                fcntl.flock(file, fcntl.LOCK_SH)
                return os.dup(file.fileno())  # the lock goes with it
        except BaseException:
            with suppress(OSError):
                os.unlink(str(file.name))
            raise
        finally:
            file.close()

    def use(self, held: int, size: int, paths: Sequence[Path]) -> bool:
        """Note that these files are in use now; False if one was evicted, or cut, although it was held."""
        with self.changing(), suppress(FileNotFoundError):
            for path in paths:
                os.utime(path)
            found = os.fstat(held)
            return found.st_nlink > 0 and found.st_size == size
        return False


def release(held: int) -> None:
    """Unlock and close. Unlocking is explicit because a forked child may have the descriptor, too."""
    fcntl.flock(held, fcntl.LOCK_UN)
    os.close(held)


def _is_free(path: Path) -> bool:
    """Does nobody lock it?"""
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
