"""Opening and comparing remote splits, for the tests of data/remote."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from sopdist.data.manifest import read_manifest
from sopdist.data.remote.store import RemoteStore
from sopdist.data.split import Split, open_split

SHARDS, SAMPLES = 6, 6
PLENTY = 1 << 30
CHUNK = 8 << 10


def open_remote(root: str, cache: Path, limit: int = PLENTY, **options: Any) -> RemoteStore:
    return RemoteStore(root, cache, limit, backoff=0.01, **options)


def open_remote_closing(root: str, cache: Path, limit: int = PLENTY, **options: Any) -> ClosingStore:
    return ClosingStore(open_remote(root, cache, limit, **options))


class ClosingStore:
    """A context manager that closes a store."""

    def __init__(self, store: RemoteStore) -> None:
        self.store = store

    def __enter__(self) -> RemoteStore:
        return self.store

    def __exit__(self, *error: object) -> None:
        self.store.close()


def assert_reads_like(store: RemoteStore, local_split: Path, ahead: bool = True) -> None:
    """Compare every sample and every label, then close the store."""
    with Split(store) as split, open_split(local_split) as expected:
        assert split.manifest == expected.manifest
        if ahead:
            store.expect(split.manifest.shards)
        for index in range(len(expected)):
            assert split.image(index) == expected.image(index)
            assert split.record(index) == expected.record(index)
        for name in ("given", "clean"):
            np.testing.assert_array_equal(split.labels(name).labels, expected.labels(name).labels)


def wait_for(condition: Callable[[], object], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.01)


def cached_tars(cache: Path) -> set[str]:
    return {path.name for path in cache.glob("*/*.tar")}


def bytes_in(cache: Path) -> int:
    """Total size of all files, by inode, because a file may be renamed meanwhile."""
    sizes = {}
    for folder, _, names in os.walk(cache):
        for name in names:
            try:
                found = os.stat(os.path.join(folder, name))
            except FileNotFoundError:
                continue
            sizes[found.st_ino] = found.st_size
    return sum(sizes.values())


def limit_for(local_split: Path, shards: float) -> int:
    """Cache limit for this many of the largest shards, and all small files."""
    small = sum(path.stat().st_size for path in local_split.rglob("*") if path.is_file() and path.suffix != ".tar")
    return int(shards * max(info.bytes for info in read_manifest(local_split).shards)) + 2 * small
