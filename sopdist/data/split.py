"""A split opened for reading: maps a sample's index to its image, record and labels."""

from __future__ import annotations

import resource
import threading
from collections import OrderedDict
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import DataError, ShardError
from .labels import LabelSet
from .manifest import ShardInfo
from .shards import Shard
from .store import LocalStore, Store

_MAX_OPEN = 64  # shards kept open: each takes a file descriptor and a few hundred kB for its index


class Split:
    """Reads samples by index. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.manifest = store.manifest()
        self.keep_open(_MAX_OPEN)
        self._open: OrderedDict[int, Shard] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self.manifest.samples

    def __enter__(self) -> Split:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def keep_open(self, shards: int) -> None:
        """Keep up to this many shards open, within the limit on open files: for reading from all of them in turn."""
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if files != resource.RLIM_INFINITY:
            shards = min(shards, max(files // 2, files - 256))  # leave the rest to other code
        self._max_open = max(1, shards)

    def image(self, index: int) -> bytes:
        """The encoded image of a sample."""
        shard, position = self.locate(index)
        return shard.image(position)

    def record(self, index: int) -> dict[str, Any]:
        """The record stored with a sample's image: its given label and its path in the source."""
        shard, position = self.locate(index)
        return shard.record(position)

    def labels(self, name: str) -> LabelSet:
        """One of the split's label sets."""
        return self.store.labels(self.manifest, name)

    def where(self, index: int) -> str:
        """Description of a sample for messages: `shard-000001.tar, key a/b, index 1003`."""
        info = self.manifest.shards[self._shard_number(index)]
        try:
            shard, position = self.locate(index)
            return f"{info.name}, key {shard.index.keys[position]}, index {index}"
        except DataError:
            return f"{info.name}, index {index}"

    def locate(self, index: int) -> tuple[Shard, int]:
        """The open shard that contains a sample, and the sample's position in it."""
        number = self._shard_number(index)
        with self._lock:
            shard = self._open.get(number)
            if shard is not None:
                self._open.move_to_end(number)
        if shard is None:
            shard = self._open_shard(number)
        return shard, index - shard.info.first

    def close(self) -> None:
        """Close all shards and the store."""
        with self._lock:
            self._open.clear()
        self.store.close()

    def _shard_number(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise DataError(f"{self.store.root}: no sample {index}; the split has {len(self)}")
        return int(self.manifest.firsts.searchsorted(index, side="right")) - 1

    def _open_shard(self, number: int) -> Shard:
        info: ShardInfo = self.manifest.shards[number]
        # Outside the lock, because it may wait for a download. Retried once, because another process may evict a shard
        # from a cache before it is opened.
        try:
            shard = Shard(self.store.folder_of(info), info)
        except ShardError:
            shard = Shard(self.store.folder_of(info), info)
        with self._lock:
            shard = self._open.setdefault(number, shard)
            while len(self._open) > self._max_open:
                self._open.popitem(last=False)  # closed when no thread refers to it any more
        return shard


def open_split(root: str | Path) -> Split:
    """Open the split in a local folder."""
    return Split(LocalStore(Path(root)))
