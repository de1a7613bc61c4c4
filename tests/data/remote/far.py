"""Helpers of the tests of remote splits."""

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
PIECE = 8 << 10


def open_remote(root: str, cache: Path, limit: int = PLENTY, **options: Any) -> RemoteStore:
    return RemoteStore(root, cache, limit, backoff=0.01, **options)


def open_remote_closing(root: str, cache: Path, limit: int = PLENTY, **options: Any) -> ClosingStore:
    return ClosingStore(open_remote(root, cache, limit, **options))


class ClosingStore:
    """A store that the end of a `with` closes."""

    def __init__(self, store: RemoteStore) -> None:
        self.store = store

    def __enter__(self) -> RemoteStore:
        return self.store

    def __exit__(self, *error: object) -> None:
        self.store.close()


def assert_reads_like(store: RemoteStore, home: Path, ahead: bool = True) -> None:
    """Every sample and every label, then close."""
    with Split(store) as split, open_split(home) as expected:
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
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def cached_tars(cache: Path) -> set[str]:
    return {path.name for path in cache.glob("*/*.tar")}


def bytes_in(cache: Path) -> int:
    """Of all files; by inode, as one may be renamed while we look."""
    sizes = {}
    for folder, _, names in os.walk(cache):
        for name in names:
            try:
                found = os.stat(os.path.join(folder, name))
            except FileNotFoundError:
                continue
            sizes[found.st_ino] = found.st_size
    return sum(sizes.values())


def limit_for(home: Path, shards: float) -> int:
    """Room for that many of the largest shards, and for all small files."""
    small = sum(path.stat().st_size for path in home.rglob("*") if path.is_file() and path.suffix != ".tar")
    return int(shards * max(info.bytes for info in read_manifest(home).shards)) + 2 * small


# The same samples, whatever the connection does
