"""The cache: prefetched, within its limit, shared by processes, and valid after a process was killed."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from sopdist.data.manifest import read_manifest, shard_name
from sopdist.data.remote import transfer
from sopdist.errors import DataError
from tests.support.http_server import HANG, Server
from tests.support.remote_splits import (
    PLENTY,
    SHARDS,
    assert_reads_like,
    bytes_in,
    cached_tars,
    limit_for,
    open_remote,
    open_remote_closing,
    wait_for,
)


def test_downloads_follow_the_expected_order(server: Server, cache: Path) -> None:
    with open_remote_closing(server.url, cache, parallel=1) as store:
        shards = store.manifest().shards
        order = [shards[number] for number in (4, 0, 5, 2, 1, 3)]
        store.expect(order)
        wait_for(lambda: len(cached_tars(cache)) == SHARDS)
        assert server.tars == [info.name for info in order]
        for info in order:
            store.folder_of(info)
        assert store.stats()["hits"] >= SHARDS - 1  # the last one may still be in progress
        assert max(server.requests.values()) == 1


@pytest.mark.usefixtures("short_grace")
def test_prefetching_fills_the_limit_and_continues_when_a_shard_is_requested(
    server: Server, cache: Path, local_split: Path
) -> None:
    with open_remote_closing(server.url, cache, limit_for(local_split, 3)) as store:
        shards = store.manifest().shards
        store.expect(shards)
        wait_for(lambda: len(cached_tars(cache)) == 3)
        time.sleep(0.3)
        assert sorted(server.tars) == [shard_name(number) for number in range(3)]
        store.folder_of(shards[0])
        wait_for(lambda: len(server.tars) == 4)
        store.expect(shards[4:])  # shards that are no longer expected make room
        wait_for(lambda: {shard_name(4), shard_name(5)} <= cached_tars(cache))
        assert max(server.requests.values()) == 1


@pytest.mark.usefixtures("short_grace")
@pytest.mark.parametrize("shards", [1.1, 2.5])
def test_the_cache_never_exceeds_its_limit(server: Server, cache: Path, local_split: Path, shards: float) -> None:
    limit = limit_for(local_split, shards)
    peak, done = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, bytes_in(cache))

    watcher = threading.Thread(target=watch)
    watcher.start()
    store = open_remote(server.url, cache, limit)
    try:
        assert_reads_like(store, local_split)
    finally:
        done.set()
        watcher.join()
    assert limit // 2 < peak <= limit
    assert store.stats()["evictions"] >= SHARDS - 3


@pytest.mark.usefixtures("short_grace")
def test_a_requested_shard_evicts_the_last_expected_one(
    server: Server, cache: Path, local_split: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limit = limit_for(local_split, 2)
    with open_remote_closing(server.url, cache, limit) as store:
        shards = store.manifest().shards
        store.expect(shards[:2])
        wait_for(lambda: len(cached_tars(cache)) == 2)
        time.sleep(0.1)
        store.folder_of(shards[5])
        assert cached_tars(cache) == {shard_name(0), shard_name(5)}
    assert f"the cache limit of {limit:,} bytes is too small" in caplog.text


@pytest.mark.usefixtures("short_grace")
def test_the_least_recently_used_shard_is_evicted_first(server: Server, cache: Path, local_split: Path) -> None:
    with open_remote_closing(server.url, cache, limit_for(local_split, 3)) as store:
        shards = store.manifest().shards
        for number in (0, 1, 2, 0, 3):
            store.folder_of(shards[number])
            time.sleep(0.1)
        assert cached_tars(cache) == {shard_name(0), shard_name(2), shard_name(3)}


@pytest.mark.usefixtures("short_grace")
def test_prefetching_does_not_evict_shards_that_another_store_expects(
    server: Server, cache: Path, local_split: Path
) -> None:
    limit = limit_for(local_split, 4)
    with open_remote_closing(server.url, cache, limit) as one, open_remote_closing(server.url, cache, limit) as two:
        shards = one.manifest().shards
        one.expect(shards[:2])
        wait_for(lambda: len(cached_tars(cache)) == 2)
        two.expect(shards[2:])
        wait_for(lambda: len(cached_tars(cache)) == 4)
        time.sleep(0.7)  # longer than the idle interval of the workers
        for info in shards[:2]:
            one.folder_of(info)
        assert one.stats()["hits"] == 2
        assert max(server.requests.values()) <= 2  # the manifest


def test_a_limit_that_cannot_hold_a_shard_is_refused_with_the_required_size(server: Server, cache: Path) -> None:
    largest = max(info.bytes for info in open_remote(server.url, cache).manifest().shards)
    with pytest.raises(DataError, match=rf"need {largest:,} bytes, but the limit .* is {largest - 1:,}"):
        open_remote(server.url, cache, largest - 1).manifest()
    with open_remote_closing(server.url, cache, largest) as store:  # no room for the index
        info = max(store.manifest().shards, key=lambda info: info.bytes)
        with pytest.raises(DataError, match="shard and index need"):
            store.folder_of(info)


@pytest.mark.usefixtures("short_grace")
def test_files_of_others_are_neither_counted_nor_touched(server: Server, cache: Path, local_split: Path) -> None:
    (cache / "thesis").mkdir(parents=True)
    others = [cache / "thesis" / "shard-000000.tar", cache / "notes.json"]
    for path in others:
        path.write_bytes(b"x" * 100_000)
        os.utime(path, (0, 0))
    assert_reads_like(open_remote(server.url, cache, limit_for(local_split, 1.5)), local_split)
    assert all(path.exists() for path in others)


# Reuse by later processes


def test_cached_files_are_not_downloaded_again(server: Server, cache: Path, local_split: Path) -> None:
    assert_reads_like(open_remote(server.url, cache), local_split)
    store = open_remote(server.url, cache)
    assert_reads_like(store, local_split, ahead=False)
    assert all(count == 1 for path, count in server.requests.items() if path.endswith((".tar", ".idx", ".npy")))
    assert store.stats()["hits"] == SHARDS


def test_files_missing_from_the_cache_are_downloaded_again(server: Server, cache: Path, local_split: Path) -> None:
    with open_remote_closing(server.url, cache) as store:
        shards = store.manifest().shards
        store.expect(shards)
        folder = cache / store.manifest().digest[:16]
        wait_for(lambda: len(list(folder.glob("*.idx"))) == SHARDS)
        (folder / shard_name(0)).unlink()
        (folder / "shard-000001.idx").unlink()
        (folder / shard_name(2)).write_bytes(b"too short")
        assert_reads_like(store, local_split)


READER = """
import hashlib, json, sys
from pathlib import Path
from sopdist.data.remote.store import RemoteStore
from sopdist.data.split import Split
store = RemoteStore(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), backoff=0.01)
print("ready", flush=True)
sys.stdin.readline()
with Split(store) as split:
    store.expect(split.manifest.shards)
    digest = hashlib.sha256()
    for index in range(len(split)):
        digest.update(split.image(index))
    print(json.dumps([digest.hexdigest(), store.stats()]))
"""


def start_reader(root: str, cache: Path, limit: int = PLENTY) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", READER, root, str(cache), str(limit)]
    return subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_two_processes_share_a_cache_and_download_each_shard_once(
    server: Server, cache: Path, local_split: Path
) -> None:
    readers = [start_reader(server.url, cache) for _ in range(2)]
    for reader in readers:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "ready\n"
    results = []
    for reader in readers:
        assert reader.stdin is not None
        reader.stdin.write("go\n")
        reader.stdin.flush()
    for reader in readers:
        output, _ = reader.communicate(timeout=60)
        assert reader.returncode == 0
        results.append(json.loads(output))
    assert results[0][0] == results[1][0]
    assert all(server.requests[shard_name(number)] == 1 for number in range(SHARDS))
    tars = sum(info.bytes for info in read_manifest(local_split).shards)
    assert tars <= results[0][1]["downloaded_bytes"] + results[1][1]["downloaded_bytes"] < 2 * tars


def test_a_killed_process_leaves_a_cache_that_the_next_one_can_use(
    server: Server, cache: Path, local_split: Path
) -> None:
    server.always[shard_name(2)] = HANG
    reader = start_reader(server.url, cache)
    assert reader.stdin is not None
    reader.stdin.write("go\n")
    reader.stdin.flush()
    wait_for(server.hanging.is_set, 60)
    wait_for(lambda: len(cached_tars(cache)) == SHARDS - 1)
    reader.send_signal(signal.SIGKILL)
    reader.communicate()
    assert shard_name(2) + ".part" in [path.name for path in cache.glob("*/*.part")]
    server.always.clear()
    assert_reads_like(open_remote(server.url, cache, limit_for(local_split, SHARDS)), local_split)
    assert not list(cache.glob("*/*.part"))
    assert not list(cache.glob("fetching-*"))
    assert server.requests[shard_name(1)] == 1


# Closing


def fetch_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("sopdist")]


@pytest.mark.parametrize("kind", ["http", "pipe"])
def test_closing_during_a_download_is_quick_and_leaves_no_files(
    server: Server, cache: Path, local_split: Path, tmp_path: Path, kind: str
) -> None:
    script = tmp_path / "slow.sh"
    script.write_text(f'case "$1" in *.tar) head -c 999 {local_split}/$1; sleep 60;; *) cat {local_split}/$1;; esac\n')
    before = set(fetch_threads())  # a decoder of another test may still be shutting down
    store = open_remote(server.url if kind == "http" else f"pipe:sh {script} {{}}", cache)
    shards = store.manifest().shards
    for info in shards:
        server.always[info.name] = HANG
    failures: list[BaseException] = []

    def request() -> None:
        try:
            store.folder_of(shards[-1])
        except DataError as error:
            failures.append(error)

    reader = threading.Thread(target=request)
    reader.start()
    store.expect(shards)
    wait_for(lambda: len(list(cache.glob("*/*.part"))) == 5)  # four workers and the reader
    started = time.monotonic()
    store.close()
    reader.join(5)
    assert time.monotonic() - started < 2
    assert "closed" in str(failures[0])
    assert not set(fetch_threads()) - before
    assert not list(cache.glob("*/*.part"))
    assert not list(cache.glob("fetching-*"))
    with pytest.raises(DataError, match="was closed"):
        store.folder_of(shards[0])
    store.close()


def test_a_store_opened_before_a_fork_is_refused(server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_remote(server.url, cache)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    with pytest.raises(DataError, match="before a fork"):
        store.manifest()


# A full disk


@pytest.mark.usefixtures("short_grace")
@pytest.mark.parametrize("times", [1, 2])
def test_a_full_disk_is_freed_once(server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    fetch, left = transfer.Transfer.fetch, [times]

    def full(self: transfer.Transfer, name: str, file: Any, size: int | None = None) -> str:
        if name == shard_name(1) and left[0]:
            left[0] -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return fetch(self, name, file, size)

    monkeypatch.setattr(transfer.Transfer, "fetch", full)
    with open_remote_closing(server.url, cache) as store:
        shards = store.manifest().shards
        store.folder_of(shards[0])
        time.sleep(0.1)
        if times == 1:
            store.folder_of(shards[1])
            assert cached_tars(cache) == {shard_name(1)}
        else:
            with pytest.raises(DataError, match=r"shard-000001\.tar: cannot be written to the cache: No space left"):
                store.folder_of(shards[1])


def test_a_cache_folder_that_cannot_be_written_is_an_error(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be used as a cache"):
        open_remote(server.url, tmp_path / "file")
