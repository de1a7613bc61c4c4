"""A remote split, prefetched into a size-limited cache on a local disk.

How far ahead: a shard that was announced (`expect`) and not yet requested (`folder_of`) is *expected*. Expected shards
are downloaded in order until they fill this process's share of the limit (the limit divided by the number of processes
that prefetch into the same cache). Each request makes room for the next download. A requested shard stays in the cache
until its space is needed; the least recently used one is evicted first. A process that still has it open can continue
to read it: POSIX keeps an open file.
"""

from __future__ import annotations

import errno
import io
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import IO, TypeVar

from ...errors import DataError, StoreError
from ...files import sha256_of
from ..labels import FOLDER as LABELS
from ..labels import LabelSet, check_name, parse_labels
from ..manifest import MANIFEST, Manifest, ShardInfo, parse_manifest
from ..shards import parse_index
from .cache import Cache, NoRoomError, release
from .transfer import ClosedError, MissingError, Transfer, log, redact_secrets

_MAX_AHEAD = 128  # shards held ready, each of which is an open file
_POLL = 0.1  # seconds between checks for changes by other processes while a caller waits for a shard
_IDLE = 0.5  # the same while no caller waits

T = TypeVar("T")


class RemoteStore:
    """A store (see data/store.py) whose files are at a URL or come from a command (`pipe:`).

    Threads may share a store, and processes may share its cache, which must be on a local disk. A store cannot be used
    after a fork.
    """

    def __init__(
        self, root: str, cache: Path, limit_bytes: int, parallel: int = 4, retries: int = 5, backoff: float = 1.0
    ) -> None:
        self._stop = threading.Event()
        self._transfer = Transfer(root, self._stop, retries, backoff)
        self.root = self._transfer.root  # without secrets
        self._cache = Cache(cache, limit_bytes)
        self._parallel = parallel
        self._process = os.getpid()
        self._manifest: Manifest | None = None
        self._folder = cache  # the split's folder, once its manifest is known
        self._manifest_lock = threading.Lock()
        self._claim_lock = threading.Lock()  # held while a worker chooses a shard, so that downloads start in order
        self._changed = threading.Condition()  # guards the attributes below
        self._expected: dict[str, ShardInfo] = {}  # in order
        self._ready: dict[str, int] = {}  # expected shards in the cache, with their held descriptors
        self._busy: set[str] = set()  # shards that a thread is working on
        self._failed: set[str] = set()  # shards that failed, and are not tried again until they are requested
        self._damaged: dict[str, str] = {}  # shards that are damaged at their source, and the error message
        self._workers: list[threading.Thread] = []
        self._marker: IO[bytes] | None = None
        self._hits, self._waited, self._warned = 0, 0.0, False

    def manifest(self) -> Manifest:
        """The manifest, fetched once."""
        self._check_usable()
        with self._manifest_lock:
            if self._manifest is None:
                where = self._transfer.address(MANIFEST)
                content, manifest = self._fetch_checked(MANIFEST, lambda content: parse_manifest(content, where))
                self._check_limit(max(shard.bytes for shard in manifest.shards))
                self._folder = self._folder_for(manifest)
                self._cache_if_possible(self._folder / MANIFEST, content)
                self._manifest = manifest
            return self._manifest

    def check(self, manifest: Manifest) -> None:
        """Does nothing: each shard is checked when it is downloaded."""

    def labels(self, manifest: Manifest, name: str) -> LabelSet:
        """Fetch a label set, unless the cache has the version named in the remote description."""
        self._check_usable()
        check_name(name)
        array_name, about_name = f"{LABELS}/{name}.npy", f"{LABELS}/{name}.json"
        cached = self._folder_for(manifest) / array_name

        def parse(about_content: bytes) -> LabelSet:
            try:
                about = json.loads(about_content)
            except ValueError:
                about = None  # parse_labels raises the error
            where = self._transfer.address(array_name)
            with suppress(OSError):
                if isinstance(about, dict) and sha256_of(cached) == about.get("sha256"):
                    os.utime(cached)
                    return parse_labels(about, cached.read_bytes(), manifest, name, where)
            content = self._transfer.fetch_bytes(array_name)
            labels = parse_labels(about, content, manifest, name, where)
            self._cache_if_possible(cached, content)
            return labels

        try:
            about_content, labels = self._fetch_checked(about_name, parse)
        except MissingError:
            known = ", ".join(self.list_labels()) or "unknown, because this address cannot be listed"
            raise DataError(f"{self.root}: no label set {name!r}; available: {known}") from None
        self._cache_if_possible(self._folder_for(manifest) / about_name, about_content)
        return labels

    def list_labels(self) -> list[str]:
        """The names of the label sets. Empty if the address cannot be listed; `labels` may still find them by name."""
        names = []
        for file in self._transfer.list_names(LABELS):
            with suppress(DataError):
                check_name(file)
                names += [file.removesuffix(".npy")] if file.endswith(".npy") else []
        return names

    def expect(self, coming: Iterable[ShardInfo]) -> None:
        """Prefetch these shards, in this order."""
        self.manifest()
        expected = {info.name: info for info in coming}
        with self._changed:
            self._check_usable()
            self._expected = expected
            self._failed.clear()
            for name in self._ready.keys() - self._expected.keys():
                release(self._ready.pop(name))
            self._changed.notify_all()
            if expected and not self._workers:
                self._marker = self._cache.register_fetcher()
                for i in range(self._parallel):
                    worker = threading.Thread(target=self._prefetch, name=f"sopdist-fetch-{i}", daemon=True)
                    worker.start()
                    self._workers.append(worker)

    def folder_of(self, info: ShardInfo) -> Path:
        """Wait until the shard is in the cache, and return the cache folder of this split."""
        try:
            return self._wait_for(info)
        except StoreError:
            raise
        except DataError as error:
            raise StoreError(str(error)) from None

    def _wait_for(self, info: ShardInfo) -> Path:
        started = time.perf_counter()
        self.manifest()
        hit, used = True, False
        while not used:
            with self._changed:
                while info.name in self._busy and not self._stop.is_set():
                    hit = False
                    self._changed.wait()
                self._check_usable()
                held = self._ready.pop(info.name, None)
                if held is None:
                    self._busy.add(info.name)
            if held is None:
                try:
                    claim = self._claim_urgent(info)
                    hit &= isinstance(claim, int)
                    held = self._fill(info, claim)
                finally:
                    self._finish(info)
            try:
                used = self._cache.mark_used(
                    held, info.bytes, [self._folder / info.name, self._folder / info.index_name]
                )
            finally:
                release(held)
        with self._changed:
            self._expected.pop(info.name, None)
            self._hits += hit
            self._waited += time.perf_counter() - started
            self._changed.notify_all()
        return self._folder

    def stats(self) -> dict[str, float]:
        """Counters since the store was opened. `hits` counts shards that were in the cache when requested."""
        return {
            "downloaded_bytes": self._transfer.received,
            "retries": self._transfer.retried,
            "evictions": self._cache.evictions,
            "hits": self._hits,
            "waited_seconds": self._waited,
        }

    def close(self) -> None:
        """Stop all downloads immediately."""
        with self._changed:
            self._stop.set()
            self._changed.notify_all()
        for worker in self._workers:
            worker.join(timeout=10)
            if worker.is_alive():  # a file system call that cannot be interrupted
                log.warning("%s: a download does not stop; its thread keeps running", self.root)
        with self._changed:
            while self._ready:
                release(self._ready.popitem()[1])
            if self._marker is not None:
                self._marker.close()

    def _prefetch(self) -> None:
        """Download expected shards until the store is closed. Runs in each worker thread."""
        while True:
            info, held = None, None
            try:
                with self._claim_lock:
                    info, claim = self._claim_next()
                held = self._fill(info, claim)
            except ClosedError:
                return
            except Exception as error:  # no caller waits yet; `folder_of` will try again and raise the error
                log.warning("prefetching failed: %s", redact_secrets(str(error)))
                with self._changed:
                    self._failed |= {info.name} if info else set()
                self._stop.wait(_IDLE)
            finally:
                if info:
                    self._finish(info, held)

    def _claim_next(self) -> tuple[ShardInfo, int | io.FileIO]:
        """Wait until there is an expected shard and room for it, and claim it."""
        while True:
            with self._cache.locked():
                budget = self._cache.limit // max(self._cache.count_fetchers(), 1)
            elsewhere: set[str] = set()  # shards that other processes are downloading
            with suppress(NoRoomError):
                while (info := self._choose(budget, elsewhere)) is not None:
                    claim = None
                    try:
                        claim = self._claim(info, expendable=None)
                    finally:
                        if claim is None:
                            self._finish(info)
                    if claim is not None:
                        return info, claim
                    elsewhere.add(info.name)
            with self._changed:
                self._changed.wait(_IDLE)

    def _choose(self, budget: int, elsewhere: set[str]) -> ShardInfo | None:
        """Mark the next expected shard as busy that is neither ready nor in progress. None if there is none."""
        with self._changed:
            self._check_usable()
            for name, held in list(self._ready.items()):
                if not os.fstat(held).st_nlink:  # evicted by another process
                    release(self._ready.pop(name))
            ahead = sum(self._expected[name].bytes for name in (*self._ready, *self._busy) if name in self._expected)
            taken = self._ready.keys() | self._busy | self._failed | elsewhere
            for info in islice(self._expected.values(), _MAX_AHEAD):
                if info.name in taken:
                    continue
                if ahead and ahead + info.bytes > budget:
                    return None
                self._busy.add(info.name)
                return info
            return None

    def _claim_urgent(self, info: ShardInfo) -> int | io.FileIO:
        """Claim a shard that a caller waits for, evicting other shards if necessary."""
        while True:
            with suppress(NoRoomError):
                claim = self._claim(info, self._expendable(info))
                if claim is not None:
                    break
            self._sleep()
        if self._cache.evicted_in_use and not self._warned:
            self._warned = True
            with self._cache.locked():
                stores = max(self._cache.count_fetchers(), 1)
            enough = stores * (self._parallel + 1) * info.bytes
            log.warning(
                "%s: the cache limit of %s bytes is too small: shards are evicted before they are used and downloaded "
                "again; raise it to %s bytes", self._cache.folder, f"{self._cache.limit:,}", f"{enough:,}",
            )  # fmt: skip
        return claim

    def _claim(self, info: ShardInfo, expendable: Sequence[Path] | None) -> int | io.FileIO | None:
        """The shard's tar, held or open for writing. None if another process is downloading it."""
        path = self._folder / info.name
        with self._cache.locked():
            held = self._cache.hold(path, info.bytes)
            return self._cache.reserve(path, info.bytes, expendable) if held is None else held

    def _fill(self, info: ShardInfo, claim: int | io.FileIO) -> int:
        """Download the missing files of a claimed shard. Returns its tar, held."""
        path = self._folder / info.name
        try:
            held = (
                claim if isinstance(claim, int) else self._cache.complete(claim, path, lambda f: self._receive(info, f))
            )
        except OSError as error:
            raise DataError(f"{path}: cannot be written to the cache: {error.strerror}") from None
        try:
            self._ensure_index(info, path.with_name(info.index_name))
        except BaseException:
            release(held)
            raise
        return held

    def _receive(self, info: ShardInfo, file: io.FileIO) -> None:
        """Download a tar. Try once more if it is damaged or the disk was full; if it stays damaged, never again."""
        if info.name in self._damaged:
            raise StoreError(self._damaged[info.name])
        for again in (True, False):
            try:
                actual = self._transfer.fetch(info.name, file, info.bytes)
                os.fsync(file.fileno())
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not again:
                    raise
                log.warning("%s: %s; making room", self._cache.folder, error.strerror)
                with self._cache.locked():
                    entries = self._cache.scan()
                    used = sum(entry.bytes for entry in entries.values())
                    self._cache.make_room(entries, used - info.bytes, expendable=None)
                continue
            if actual == info.sha256:
                return
            if again:
                log.warning(
                    "%s: checksum differs from the manifest; downloading again", self._transfer.address(info.name)
                )
        self._damaged[info.name] = (
            f"{self._transfer.address(info.name)}: SHA-256 is {actual}, but the manifest says {info.sha256}; it was "
            "downloaded twice, so the remote file is damaged or belongs to another split: upload it again"
        )
        raise StoreError(self._damaged[info.name])

    def _ensure_index(self, info: ShardInfo, path: Path) -> None:
        """Download the shard's index, unless the cache has it."""
        if path.exists():
            return
        where = self._transfer.address(info.index_name)

        def check(content: bytes) -> None:
            samples = len(parse_index(content.decode(errors="replace"), where).keys)
            if samples != info.samples or not content.endswith(b"\n"):
                raise DataError(f"{where}: truncated, or has {samples} samples where the manifest says {info.samples}")

        content, _ = self._fetch_checked(info.index_name, check)
        self._check_limit(info.bytes + len(content))
        while not self._put(path, content, self._expendable(info)) and not path.exists():
            self._sleep()

    def _expendable(self, info: ShardInfo) -> list[Path]:
        """Files that may be evicted for a shard that a caller waits for: the other expected shards, last one first."""
        with self._changed:
            return [self._folder / name for name in reversed(self._expected) if name != info.name]

    def _put(self, path: Path, content: bytes, expendable: Sequence[Path] | None = None) -> bool:
        """Write a small file to the cache. False if that is not possible now."""

        def write(file: io.FileIO) -> None:
            file.write(content)
            os.fsync(file.fileno())

        with suppress(NoRoomError):
            with self._cache.locked():
                file = self._cache.reserve(path, len(content), expendable)
            if file is not None:
                release(self._cache.complete(file, path, write))
                return True
        return False

    def _cache_if_possible(self, path: Path, content: bytes) -> None:
        """Write a small file to the cache if there is room. Nothing depends on it."""
        with suppress(OSError):
            self._put(path, content)

    def _fetch_checked(self, name: str, parse: Callable[[bytes], T]) -> tuple[bytes, T]:
        """Fetch and parse a small file. Try once more if it is damaged."""
        content = self._transfer.fetch_bytes(name)
        try:
            return content, parse(content)
        except (ClosedError, MissingError):
            raise
        except DataError as error:
            log.warning("%s; downloading again", redact_secrets(str(error)))
        content = self._transfer.fetch_bytes(name)
        return content, parse(content)

    def _check_limit(self, needed: int) -> None:
        if needed > self._cache.limit:
            raise DataError(
                f"{self.root}: its largest shard and index need {needed:,} bytes, but the limit of the cache in "
                f"{self._cache.folder} is {self._cache.limit:,}; raise it to {(self._parallel + 1) * needed:,}"
            )

    def _folder_for(self, manifest: Manifest) -> Path:
        return self._cache.folder / manifest.digest[:16]

    def _finish(self, info: ShardInfo, held: int | None = None) -> None:
        with self._changed:
            self._busy.discard(info.name)
            if held is not None and info.name in self._expected and not self._stop.is_set():
                self._ready[info.name] = held
            elif held is not None:
                release(held)
            self._changed.notify_all()

    def _sleep(self) -> None:
        """Wait for other processes."""
        self._stop.wait(_POLL)
        self._check_usable()

    def _check_usable(self) -> None:
        if self._stop.is_set():
            raise ClosedError(f"{self.root}: was closed")
        if os.getpid() != self._process:
            raise DataError(f"{self.root}: was opened before a fork; open it in the process that reads from it")
