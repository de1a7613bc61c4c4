"""A split that is open for reading: from a sample's index to its image, key and labels."""

from __future__ import annotations

import resource
import threading
from collections import OrderedDict
from pathlib import Path
from types import TracebackType
from typing import Any

from .errors import DataError, ShardError
from .labels import LabelSet
from .manifest import ShardInfo
from .shards import Shard
from .store import LocalStore, Store

_MOST_OPEN = 64  # shards kept open: a file descriptor and some hundred kB of index each


class Split:
    """Reads samples by index. Threads may share it."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.manifest = store.manifest()
        self.keep_open(_MOST_OPEN)
        self._open: OrderedDict[int, Shard] = OrderedDict()  # by use, the most recent last
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
        """Keep so many shards open, as far as this process may: for one that reads from all of them in turn."""
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if files != resource.RLIM_INFINITY:
            shards = min(shards, max(files // 2, files - 256))  # the rest is for others
        self._most_open = max(1, shards)

    def image(self, index: int) -> bytes:
        """The encoded image of a sample."""
        shard, place = self.place_of(index)
        return shard.image(place)

    def record(self, index: int) -> dict[str, Any]:
        """What was written beside the image at preparation: its label and path."""
        shard, place = self.place_of(index)
        return shard.record(place)

    def labels(self, name: str) -> LabelSet:
        """One of the split's label sets."""
        return self.store.labels(self.manifest, name)

    def where(self, index: int) -> str:
        """`shard-000001.tar, key a/b, index 1003`: for messages."""
        info = self.manifest.shards[self._shard_number(index)]
        try:
            shard, place = self.place_of(index)
            return f"{info.name}, key {shard.index.keys[place]}, index {index}"
        except DataError:
            return f"{info.name}, index {index}"

    def place_of(self, index: int) -> tuple[Shard, int]:
        """The open shard that holds a sample, and its place in it."""
        number = self._shard_number(index)
        with self._lock:
            shard = self._open.get(number)
            if shard is not None:
                self._open.move_to_end(number)
        if shard is None:
            shard = self._open_shard(number)
        return shard, index - shard.info.first

    def close(self) -> None:
        """Close all shards, and the store."""
        with self._lock:
            self._open.clear()
        self.store.close()

    def _shard_number(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise DataError(f"{self.store.root}: no sample {index}; it has {len(self)}")
        return int(self.manifest.firsts.searchsorted(index, side="right")) - 1

    def _open_shard(self, number: int) -> Shard:
        info: ShardInfo = self.manifest.shards[number]
        # Outside of the lock, because it may wait for a download. A second time, because another process may evict a
        # shard from a cache before it is open.
        try:
            shard = Shard(self.store.folder_of(info), info)
        except ShardError:
            shard = Shard(self.store.folder_of(info), info)
        with self._lock:
            shard = self._open.setdefault(number, shard)
            while len(self._open) > self._most_open:
                self._open.popitem(last=False)  # closed when the last thread that reads from it lets go
        return shard


def open_split(root: str | Path) -> Split:
    """Open a split that is a local folder."""
    return Split(LocalStore(Path(root)))
