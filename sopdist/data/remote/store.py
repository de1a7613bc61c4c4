"""A split at a remote address, behind a bounded cache on a local disk that is filled ahead.

How far ahead: a shard that was announced (`expect`) and not yet handed out (`folder_of`) is *expected*. Expected shards
are downloaded in order until they fill this process's part of the limit (the limit over the processes that fetch ahead
into the same cache); each hand-out makes room for the next one. A shard that was handed out stays for as long as its
room is not needed, and goes in the order of last use. Whoever still has it open reads on: POSIX keeps an open file.
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

from ...files import sha256_of
from ..errors import DataError, StoreError
from ..labels import FOLDER as LABELS
from ..labels import LabelSet, check_name, parse_labels
from ..manifest import MANIFEST, Manifest, ShardInfo, parse_manifest
from ..shards import parse_index
from .cache import Cache, NoRoomError, release
from .transfer import ClosedError, MissingError, Transfer, log, without_secrets

_MOST_AHEAD = 128  # shards held ready: each is an open file
_POLL = 0.1  # seconds between two looks at what other processes do, when a shard is waited for
_IDLE = 0.5  # the same, when none is

T = TypeVar("T")


class RemoteStore:
    """A store (store.py) whose files are at a URL or come from a command (`pipe:`).

    Threads may share it, and processes its cache, which must be on a local disk. It does not survive a fork.
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
        self._folder = cache  # the split's, as soon as its manifest is known
        self._manifest_lock = threading.Lock()
        self._turn = threading.Lock()  # workers choose one after the other, so that downloads begin in order
        self._changed = threading.Condition()  # guards what follows
        self._expected: dict[str, ShardInfo] = {}  # in order
        self._ready: dict[str, int] = {}  # expected and in the cache, with its hold
        self._busy: set[str] = set()  # some thread sees to it
        self._failed: set[str] = set()  # not tried again until somebody asks
        self._damaged: dict[str, str] = {}  # shards that are wrong at their source, and the message
        self._workers: list[threading.Thread] = []
        self._sign: IO[bytes] | None = None
        self._hits, self._waited, self._warned = 0, 0.0, False

    def manifest(self) -> Manifest:
        """Fetched once."""
        self._check_usable()
        with self._manifest_lock:
            if self._manifest is None:
                where = self._transfer.address(MANIFEST)
                content, manifest = self._fetch_checked(MANIFEST, lambda content: parse_manifest(content, where))
                self._check_limit(max(shard.bytes for shard in manifest.shards))
                self._folder = self._folder_for(manifest)
                self._keep(self._folder / MANIFEST, content)
                self._manifest = manifest
            return self._manifest

    def check(self, manifest: Manifest) -> None:
        """Nothing: each shard is checked when it arrives."""

    def labels(self, manifest: Manifest, name: str) -> LabelSet:
        """Fetched, unless the cache has the version that the remote description names."""
        self._check_usable()
        check_name(name)
        array_name, about_name = f"{LABELS}/{name}.npy", f"{LABELS}/{name}.json"
        cached = self._folder_for(manifest) / array_name

        def parse(about_content: bytes) -> LabelSet:
            try:
                about = json.loads(about_content)
            except ValueError:
                about = None  # parse_labels has the words for that
            where = self._transfer.address(array_name)
            with suppress(OSError):
                if isinstance(about, dict) and sha256_of(cached) == about.get("sha256"):
                    os.utime(cached)
                    return parse_labels(about, cached.read_bytes(), manifest, name, where)
            content = self._transfer.fetch_bytes(array_name)
            labels = parse_labels(about, content, manifest, name, where)
            self._keep(cached, content)
            return labels

        try:
            about_content, labels = self._fetch_checked(about_name, parse)
        except MissingError:
            known = ", ".join(self.list_labels()) or "unknown, as this address cannot be listed"
            raise DataError(f"{self.root}: no label set {name!r}; there is: {known}") from None
        self._keep(self._folder_for(manifest) / about_name, about_content)
        return labels

    def list_labels(self) -> list[str]:
        """Where the address can be listed; otherwise none, though `labels` may find them by name."""
        names = []
        for file in self._transfer.list_names(LABELS):
            with suppress(DataError):
                check_name(file)
                names += [file.removesuffix(".npy")] if file.endswith(".npy") else []
        return names

    def expect(self, coming: Iterable[ShardInfo]) -> None:
        """Fetch these ahead, in this order."""
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
                self._sign = self._cache.announce()
                for number in range(self._parallel):
                    worker = threading.Thread(target=self._work, name=f"sopdist-fetch-{number}", daemon=True)
                    worker.start()
                    self._workers.append(worker)

    def folder_of(self, info: ShardInfo) -> Path:
        """The cache's folder of this split, once it has the shard."""
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
                    claim = self._claim_soon(info)
                    hit &= isinstance(claim, int)
                    held = self._fill(info, claim)
                finally:
                    self._no_longer_busy(info)
            try:
                used = self._cache.use(held, info.bytes, [self._folder / info.name, self._folder / info.index_name])
            finally:
                release(held)
        with self._changed:
            self._expected.pop(info.name, None)
            self._hits += hit
            self._waited += time.perf_counter() - started
            self._changed.notify_all()
        return self._folder

    def stats(self) -> dict[str, float]:
        """What it took so far; `hits` are shards that were there when they were asked for."""
        return {
            "downloaded_bytes": self._transfer.received,
            "retries": self._transfer.retried,
            "evictions": self._cache.evictions,
            "hits": self._hits,
            "waited_seconds": self._waited,
        }

    def close(self) -> None:
        """Stop all downloads, at once."""
        with self._changed:
            self._stop.set()
            self._changed.notify_all()
        for worker in self._workers:
            worker.join(timeout=10)
            if worker.is_alive():  # a file system that cannot be interrupted
                log.warning("%s: a download does not end; it is left behind", self.root)
        with self._changed:
            while self._ready:
                release(self._ready.popitem()[1])
            if self._sign is not None:
                self._sign.close()

    def _work(self) -> None:
        """Fetch ahead, until closed."""
        while True:
            info, held = None, None
            try:
                with self._turn:
                    info, claim = self._claim_next()
                held = self._fill(info, claim)
            except ClosedError:
                return
            except Exception as error:  # nobody waits for it yet; whoever will tries again and gets the error
                log.warning("fetching ahead failed: %s", without_secrets(str(error)))
                with self._changed:
                    self._failed |= {info.name} if info else set()
                self._stop.wait(_IDLE)
            finally:
                if info:
                    self._no_longer_busy(info, held)

    def _claim_next(self) -> tuple[ShardInfo, int | io.FileIO]:
        """Wait for the next expected shard that there is room for, and claim it."""
        while True:
            with self._cache.changing():
                budget = self._cache.limit // max(self._cache.fetching(), 1)
            elsewhere: set[str] = set()  # shards that another process is fetching
            with suppress(NoRoomError):
                while (info := self._choose(budget, elsewhere)) is not None:
                    claim = None
                    try:
                        claim = self._claim(info, expendable=None)
                    finally:
                        if claim is None:
                            self._no_longer_busy(info)
                    if claim is not None:
                        return info, claim
                    elsewhere.add(info.name)
            with self._changed:
                self._changed.wait(_IDLE)

    def _choose(self, budget: int, elsewhere: set[str]) -> ShardInfo | None:
        """The next expected shard that nobody sees to, made busy; None if there is none for now."""
        with self._changed:
            self._check_usable()
            for name, held in list(self._ready.items()):
                if not os.fstat(held).st_nlink:  # another process needed the room
                    release(self._ready.pop(name))
            ahead = sum(self._expected[name].bytes for name in (*self._ready, *self._busy) if name in self._expected)
            taken = self._ready.keys() | self._busy | self._failed | elsewhere
            for info in islice(self._expected.values(), _MOST_AHEAD):
                if info.name in taken:
                    continue
                if ahead and ahead + info.bytes > budget:
                    return None
                self._busy.add(info.name)
                return info
            return None

    def _claim_soon(self, info: ShardInfo) -> int | io.FileIO:
        """Claim a shard that somebody waits for, at the cost of others if need be."""
        while True:
            with suppress(NoRoomError):
                claim = self._claim(info, self._expendable(info))
                if claim is not None:
                    break
            self._sleep()
        if self._cache.dropped and not self._warned:
            self._warned = True
            with self._cache.changing():
                stores = max(self._cache.fetching(), 1)
            enough = stores * (self._parallel + 1) * info.bytes
            log.warning(
                "%s: the limit of %s bytes is too small for what is read at once: shards go before they are used, and "
                "are fetched again; allow %s bytes", self._cache.folder, f"{self._cache.limit:,}", f"{enough:,}",
            )  # fmt: skip
        return claim

    def _claim(self, info: ShardInfo, expendable: Sequence[Path] | None) -> int | io.FileIO | None:
        """The shard's tar held, or open for writing; None if another process is fetching it."""
        path = self._folder / info.name
        with self._cache.changing():
            held = self._cache.hold(path, info.bytes)
            return self._cache.begin(path, info.bytes, expendable) if held is None else held

    def _fill(self, info: ShardInfo, claim: int | io.FileIO) -> int:
        """Download what is missing of a claimed shard; returns its tar held."""
        path = self._folder / info.name
        try:
            held = (
                claim if isinstance(claim, int) else self._cache.complete(claim, path, lambda f: self._receive(info, f))
            )
        except OSError as error:
            raise DataError(f"{path}: cannot be written to the cache: {error.strerror}") from None
        try:
            self._need_index(info, path.with_name(info.index_name))
        except BaseException:
            release(held)
            raise
        return held

    def _receive(self, info: ShardInfo, file: io.FileIO) -> None:
        """Download a tar; once more if it is damaged, or if the disk was full. If it stays damaged, that was all."""
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
                with self._cache.changing():
                    entries = self._cache.survey()
                    used = sum(entry.bytes for entry in entries.values())
                    self._cache.make_room(entries, used - info.bytes, expendable=None)
                continue
            if actual == info.sha256:
                return
            if again:
                log.warning("%s: has not the checksum of the manifest; once more", self._transfer.address(info.name))
        self._damaged[info.name] = (
            f"{self._transfer.address(info.name)}: SHA-256 is {actual}, the manifest says {info.sha256}; it was "
            "fetched twice, so the file there is damaged or not of this split: upload it again"
        )
        raise StoreError(self._damaged[info.name])

    def _need_index(self, info: ShardInfo, path: Path) -> None:
        """Have the shard's index in the cache."""
        if path.exists():
            return
        where = self._transfer.address(info.index_name)

        def check(content: bytes) -> None:
            samples = len(parse_index(content.decode(errors="replace"), where).keys)
            if samples != info.samples or not content.endswith(b"\n"):
                raise DataError(f"{where}: {samples} samples, the manifest says {info.samples}, or cut short")

        content, _ = self._fetch_checked(info.index_name, check)
        self._check_limit(info.bytes + len(content))
        while not self._put(path, content, self._expendable(info)) and not path.exists():
            self._sleep()

    def _expendable(self, info: ShardInfo) -> list[Path]:
        """What may go for a shard that is waited for: the other expected ones, the last first."""
        with self._changed:
            return [self._folder / name for name in reversed(self._expected) if name != info.name]

    def _put(self, path: Path, content: bytes, expendable: Sequence[Path] | None = None) -> bool:
        """Write a small file to the cache; False if that is not possible now."""

        def write(file: io.FileIO) -> None:
            file.write(content)
            os.fsync(file.fileno())

        with suppress(NoRoomError):
            with self._cache.changing():
                file = self._cache.begin(path, len(content), expendable)
            if file is not None:
                release(self._cache.complete(file, path, write))
                return True
        return False

    def _keep(self, path: Path, content: bytes) -> None:
        """Write a small file to the cache if there is room; nothing depends on it."""
        with suppress(OSError):
            self._put(path, content)

    def _fetch_checked(self, name: str, parse: Callable[[bytes], T]) -> tuple[bytes, T]:
        """Fetch a small file and parse it; once more if it is damaged."""
        content = self._transfer.fetch_bytes(name)
        try:
            return content, parse(content)
        except (ClosedError, MissingError):
            raise
        except DataError as error:
            log.warning("%s; once more", without_secrets(str(error)))
        content = self._transfer.fetch_bytes(name)
        return content, parse(content)

    def _check_limit(self, needed: int) -> None:
        if needed > self._cache.limit:
            raise DataError(
                f"{self.root}: its largest shard and index need {needed:,} bytes, the limit of the cache in "
                f"{self._cache.folder} is {self._cache.limit:,}; allow {(self._parallel + 1) * needed:,}"
            )

    def _folder_for(self, manifest: Manifest) -> Path:
        return self._cache.folder / manifest.digest[:16]

    def _no_longer_busy(self, info: ShardInfo, held: int | None = None) -> None:
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
            raise DataError(f"{self.root}: was opened before a fork; open it in the process that reads")
