"""Reading a split from far away: the same samples as at home, whatever the connection does."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from sopdist.data import remote, transfer
from sopdist.data.errors import DataError
from sopdist.data.labels import read_labels, write_labels
from sopdist.data.manifest import read_manifest, shard_name
from sopdist.data.remote import RemoteStore, open_store
from sopdist.data.split import Split, open_split
from sopdist.data.store import LocalStore
from sopdist.data.transfer import without_secrets

from .http_server import CLIP, CUT, DROP, HANG, WRONG, Server
from .pictures import encoded, picture
from .small_splits import sample, write_split

SHARDS, SAMPLES = 6, 6
PLENTY = 1 << 30
PIECE = 8 << 10


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A split on this machine: the oracle of all tests."""
    folder = tmp_path_factory.mktemp("split")
    members = [sample(index, image=encoded(picture(index), quality=95)) for index in range(SHARDS * SAMPLES)]
    manifest = write_split(folder, members, per_shard=SAMPLES)
    write_labels(folder, manifest, "clean", np.zeros(manifest.samples, dtype=np.int64), {"kind": "test"})
    return folder


@pytest.fixture
def server(home: Path) -> Iterator[Server]:
    with Server(home) as server:
        yield server


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_PIECE", PIECE)
    monkeypatch.setattr(transfer, "_LEAST_PIECE", PIECE // 4)


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_GRACE", 0.05)


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


@pytest.mark.parametrize("ahead", [True, False])
def test_remote_samples_and_labels_equal_the_local_ones(server: Server, cache: Path, home: Path, ahead: bool) -> None:
    store = open_remote(server.url, cache)
    assert_reads_like(store, home, ahead)
    assert store.stats()["retries"] == 0
    assert max(server.requests.values()) == 1


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("fault", [DROP, CUT, CLIP, 500, 503, 429])
def test_a_bad_connection_costs_retries_and_nothing_else(
    server: Server, cache: Path, home: Path, fault: str | int
) -> None:
    for path in ("manifest.json", "labels/given.npy", *(shard_name(number) for number in range(SHARDS))):
        server.faults[path] = [fault, fault]
    store = open_remote(server.url, cache)
    if fault == CLIP:  # what nobody knows the size of cannot be seen to be short; its content tells
        server.faults["manifest.json"] = server.faults["labels/given.npy"] = [fault]
    assert_reads_like(store, home)
    assert store.stats()["retries"] >= 2 * SHARDS


@pytest.mark.usefixtures("small_pieces")
def test_a_dropped_connection_costs_a_piece_and_not_the_file(server: Server, cache: Path) -> None:
    name = shard_name(0)
    server.faults[name] = [CLIP, DROP, 503]
    store = open_remote(server.url, cache)
    info = store.manifest().shards[0]
    store.folder_of(info)
    pieces = -(-info.bytes // PIECE)
    assert pieces > 2
    assert server.requests[name] <= pieces + 5  # after each failure a smaller piece or two
    store.close()


@pytest.mark.usefixtures("small_pieces")
def test_a_connection_that_always_breaks_early_still_makes_headway(
    server: Server, cache: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = transfer.Transfer._call

    def breaks_beyond_2k(self: transfer.Transfer, method: str, path: str, **arguments: Any) -> Any:
        if path.endswith(".tar") and arguments["end"] - arguments["start"] > PIECE // 4:
            raise ConnectionResetError("too long")
        return call(self, method, path, **arguments)

    monkeypatch.setattr(transfer.Transfer, "_call", breaks_beyond_2k)
    assert_reads_like(open_remote(server.url, cache), home)


@pytest.mark.usefixtures("small_pieces")
def test_a_server_without_ranges_sends_each_file_once(cache: Path, home: Path) -> None:
    with Server(home, ranges=False) as server:
        assert_reads_like(open_remote(server.url, cache), home)
        assert max(server.requests.values()) == 1


@pytest.mark.usefixtures("small_pieces")
def test_a_server_without_ranges_may_drop_connections(cache: Path, home: Path) -> None:
    with Server(home, ranges=False) as server:
        server.faults[shard_name(1)] = [DROP, CUT]
        assert_reads_like(open_remote(server.url, cache), home)
        assert server.requests[shard_name(1)] == 3


@pytest.mark.parametrize("content", [b"", b"x", b"x" * (PIECE - 1), b"x" * PIECE, b"xy" * PIECE, b"x" * (PIECE + 1)])
@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("ranges", [True, False])
def test_files_of_unknown_size_come_whole(tmp_path: Path, content: bytes, ranges: bool) -> None:
    (tmp_path / "file+1").write_bytes(content)
    with Server(tmp_path, ranges) as server:
        far = transfer.Transfer(server.url, threading.Event(), retries=0)
        if content or not ranges:
            assert far.fetch_bytes("file+1") == content
        else:
            with pytest.raises(DataError, match="416"):
                far.fetch_bytes("file+1")


def test_a_file_of_unknown_size_is_refused_beyond_the_cap(
    server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "MOST_UNKNOWN", 100)
    with pytest.raises(DataError, match=r"manifest\.json: .* bytes, far more"):
        open_remote(server.url, cache).manifest()


# What is wrong there


def test_a_wrong_checksum_is_downloaded_once_more(server: Server, cache: Path, home: Path) -> None:
    for path in ("manifest.json", "labels/given.npy", "labels/clean.json", "shard-000002.idx", shard_name(3)):
        server.faults[path] = [WRONG]
    assert_reads_like(open_remote(server.url, cache), home)
    assert server.requests[shard_name(3)] == 2


def test_a_checksum_that_stays_wrong_is_named_and_nothing_is_kept(server: Server, cache: Path) -> None:
    server.always[shard_name(3)] = WRONG
    store = open_remote(server.url, cache)
    info = store.manifest().shards[3]
    with pytest.raises(DataError, match=rf"shard-000003\.tar: SHA-256 is [0-9a-f]{{64}}, .* {info.sha256}"):
        store.folder_of(info)
    assert server.requests[info.name] == 2
    assert not cached_tars(cache)
    assert not list(cache.glob("*/*.part"))
    server.always.clear()  # repaired: the same store goes on
    assert (store.folder_of(info) / info.name).exists()
    store.close()


@pytest.mark.parametrize(("status", "said"), [(404, "not found"), (403, "access denied"), (401, "access denied")])
def test_what_will_not_change_is_not_retried(server: Server, cache: Path, status: int, said: str) -> None:
    server.always[shard_name(0)] = status
    with open_remote_closing(server.url, cache) as store:
        info = store.manifest().shards[0]
        with pytest.raises(DataError, match=rf"{server.address}/shard-000000\.tar: {said}"):
            store.folder_of(info)
    assert server.requests[info.name] == 1


def test_retries_end(server: Server, cache: Path) -> None:
    server.always[shard_name(0)] = 500
    with open_remote_closing(server.url, cache, retries=3) as store:
        with pytest.raises(DataError, match=r"shard-000000\.tar: HTTP 500 .*given up after 4 tries"):
            store.folder_of(store.manifest().shards[0])
        assert store.stats()["retries"] == 3


def test_what_failed_ahead_fails_when_it_is_asked_for_and_the_others_are_there(server: Server, cache: Path) -> None:
    server.always[shard_name(0)] = 404
    with open_remote_closing(server.url, cache) as store:
        shards = store.manifest().shards
        store.expect(shards)
        wait_for(lambda: len(cached_tars(cache)) == SHARDS - 1)
        with pytest.raises(DataError, match="not found"):
            store.folder_of(shards[0])
        store.folder_of(shards[1])
        assert server.requests[shard_name(1)] == 1


def test_a_wrong_address_says_so(server: Server, cache: Path) -> None:
    with pytest.raises(DataError, match=r"nothing/manifest\.json: not found; is the address right"):
        open_remote(f"{server.url}/nothing", cache).manifest()
    server.always["manifest.json"] = WRONG
    with pytest.raises(DataError, match=r"manifest\.json: not JSON"):
        open_remote(server.url, cache).manifest()


# Labels


def test_label_sets_are_listed_kept_and_renewed(server: Server, cache: Path, home: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    (copy / "labels").mkdir(parents=True)
    for path in home.glob("**/*.[jn][sp]*"):
        (copy / path.relative_to(home)).write_bytes(path.read_bytes())
    server.folder = copy
    with open_remote_closing(server.url, cache) as store:
        manifest = store.manifest()
        assert store.list_labels() == ["clean", "given"]
        first = store.labels(manifest, "given")
        assert first.recipe == {"kind": "test"}
        store.labels(manifest, "given")
        assert server.requests["labels/given.npy"] == 1  # the second came from the cache
        write_labels(copy, manifest, "given", 2 - first.labels, {"kind": "another"})
        np.testing.assert_array_equal(store.labels(manifest, "given").labels, 2 - first.labels)
        assert read_labels(next(cache.glob("*/manifest.json")).parent, manifest, "given").recipe == {"kind": "another"}
        with pytest.raises(DataError, match=r"no label set 'best'; there is: clean, given"):
            store.labels(manifest, "best")
        with pytest.raises(DataError, match="label set name"):
            store.labels(manifest, "../given")
        server.listing = False
        assert store.list_labels() == []
        with pytest.raises(DataError, match="cannot be listed"):
            store.labels(manifest, "best")


# Ahead, in order, within the limit


def test_downloads_follow_the_expected_order(server: Server, cache: Path) -> None:
    with open_remote_closing(server.url, cache, parallel=1) as store:
        shards = store.manifest().shards
        order = [shards[number] for number in (4, 0, 5, 2, 1, 3)]
        store.expect(order)
        wait_for(lambda: len(cached_tars(cache)) == SHARDS)
        assert server.tars == [info.name for info in order]
        for info in order:
            store.folder_of(info)
        assert store.stats()["hits"] >= SHARDS - 1  # the last one may be about to come
        assert max(server.requests.values()) == 1


@pytest.mark.usefixtures("short_grace")
def test_as_much_is_fetched_ahead_as_the_limit_holds_and_the_next_when_one_is_taken(
    server: Server, cache: Path, home: Path
) -> None:
    with open_remote_closing(server.url, cache, limit_for(home, 3)) as store:
        shards = store.manifest().shards
        store.expect(shards)
        wait_for(lambda: len(cached_tars(cache)) == 3)
        time.sleep(0.3)
        assert sorted(server.tars) == [shard_name(number) for number in range(3)]
        store.folder_of(shards[0])
        wait_for(lambda: len(server.tars) == 4)
        store.expect(shards[4:])  # what is not expected any more makes room
        wait_for(lambda: {shard_name(4), shard_name(5)} <= cached_tars(cache))
        assert max(server.requests.values()) == 1


@pytest.mark.usefixtures("short_grace")
@pytest.mark.parametrize("shards", [1.1, 2.5])
def test_the_cache_never_exceeds_its_limit(server: Server, cache: Path, home: Path, shards: float) -> None:
    limit = limit_for(home, shards)
    most, done = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.is_set():
            most = max(most, bytes_in(cache))

    watcher = threading.Thread(target=watch)
    watcher.start()
    store = open_remote(server.url, cache, limit)
    try:
        assert_reads_like(store, home)
    finally:
        done.set()
        watcher.join()
    assert limit // 2 < most <= limit
    assert store.stats()["evictions"] >= SHARDS - 3


@pytest.mark.usefixtures("short_grace")
def test_who_waits_gets_room_at_the_cost_of_the_last_expected(
    server: Server, cache: Path, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limit = limit_for(home, 2)
    with open_remote_closing(server.url, cache, limit) as store:
        shards = store.manifest().shards
        store.expect(shards[:2])
        wait_for(lambda: len(cached_tars(cache)) == 2)
        time.sleep(0.1)
        store.folder_of(shards[5])
        assert cached_tars(cache) == {shard_name(0), shard_name(5)}
    assert f"the limit of {limit:,} bytes is too small" in caplog.text


@pytest.mark.usefixtures("short_grace")
def test_the_least_recently_used_goes_first(server: Server, cache: Path, home: Path) -> None:
    with open_remote_closing(server.url, cache, limit_for(home, 3)) as store:
        shards = store.manifest().shards
        for number in (0, 1, 2, 0, 3):
            store.folder_of(shards[number])
            time.sleep(0.1)
        assert cached_tars(cache) == {shard_name(0), shard_name(2), shard_name(3)}


@pytest.mark.usefixtures("short_grace")
def test_fetching_ahead_leaves_alone_what_another_store_expects(server: Server, cache: Path, home: Path) -> None:
    limit = limit_for(home, 4)
    with open_remote_closing(server.url, cache, limit) as one, open_remote_closing(server.url, cache, limit) as two:
        shards = one.manifest().shards
        one.expect(shards[:2])
        wait_for(lambda: len(cached_tars(cache)) == 2)
        two.expect(shards[2:])
        wait_for(lambda: len(cached_tars(cache)) == 4)
        time.sleep(0.7)  # longer than workers idle
        for info in shards[:2]:
            one.folder_of(info)
        assert one.stats()["hits"] == 2
        assert max(server.requests.values()) <= 2  # the manifest


def test_a_limit_that_cannot_hold_a_shard_is_refused_with_the_figure(server: Server, cache: Path) -> None:
    largest = max(info.bytes for info in open_remote(server.url, cache).manifest().shards)
    with pytest.raises(DataError, match=rf"need {largest:,} bytes, the limit .* is {largest - 1:,}"):
        open_remote(server.url, cache, largest - 1).manifest()
    with open_remote_closing(server.url, cache, largest) as store:  # no room for the index
        info = max(store.manifest().shards, key=lambda info: info.bytes)
        with pytest.raises(DataError, match="shard and index need"):
            store.folder_of(info)


@pytest.mark.usefixtures("short_grace")
def test_files_that_are_not_ours_are_neither_counted_nor_touched(server: Server, cache: Path, home: Path) -> None:
    (cache / "thesis").mkdir(parents=True)
    mine = [cache / "thesis" / "shard-000000.tar", cache / "notes.json"]
    for path in mine:
        path.write_bytes(b"x" * 100_000)
        os.utime(path, (0, 0))
    assert_reads_like(open_remote(server.url, cache, limit_for(home, 1.5)), home)
    assert all(path.exists() for path in mine)


# The cache outlives its processes


def test_what_is_cached_is_not_downloaded_again(server: Server, cache: Path, home: Path) -> None:
    assert_reads_like(open_remote(server.url, cache), home)
    store = open_remote(server.url, cache)
    assert_reads_like(store, home, ahead=False)
    assert all(count == 1 for path, count in server.requests.items() if path.endswith((".tar", ".idx", ".npy")))
    assert store.stats()["hits"] == SHARDS


def test_what_vanished_from_the_cache_is_downloaded_again(server: Server, cache: Path, home: Path) -> None:
    with open_remote_closing(server.url, cache) as store:
        shards = store.manifest().shards
        store.expect(shards)
        folder = cache / store.manifest().digest[:16]
        wait_for(lambda: len(list(folder.glob("*.idx"))) == SHARDS)
        (folder / shard_name(0)).unlink()
        (folder / "shard-000001.idx").unlink()
        (folder / shard_name(2)).write_bytes(b"too short")
        assert_reads_like(store, home)


READER = """
import hashlib, json, sys
from pathlib import Path
from sopdist.data.remote import RemoteStore
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


def test_two_processes_share_a_cache_and_download_each_shard_once(server: Server, cache: Path, home: Path) -> None:
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
    tars = sum(info.bytes for info in read_manifest(home).shards)
    assert tars <= results[0][1]["downloaded_bytes"] + results[1][1]["downloaded_bytes"] < 2 * tars


def test_a_killed_process_leaves_a_cache_that_the_next_one_can_use(server: Server, cache: Path, home: Path) -> None:
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
    assert_reads_like(open_remote(server.url, cache, limit_for(home, SHARDS)), home)
    assert not list(cache.glob("*/*.part"))
    assert not list(cache.glob("fetching-*"))
    assert server.requests[shard_name(1)] == 1


# Closing


def fetch_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("sopdist")]


@pytest.mark.parametrize("kind", ["http", "pipe"])
def test_close_in_the_middle_of_a_download_is_quick_and_leaves_nothing(
    server: Server, cache: Path, home: Path, tmp_path: Path, kind: str
) -> None:
    script = tmp_path / "slow.sh"
    script.write_text(f'case "$1" in *.tar) head -c 999 {home}/$1; sleep 60;; *) cat {home}/$1;; esac\n')
    store = open_remote(server.url if kind == "http" else f"pipe:sh {script} {{}}", cache)
    shards = store.manifest().shards
    for info in shards:
        server.always[info.name] = HANG
    failures: list[BaseException] = []

    def ask() -> None:
        try:
            store.folder_of(shards[-1])
        except DataError as error:
            failures.append(error)

    reader = threading.Thread(target=ask)
    reader.start()
    store.expect(shards)
    wait_for(lambda: len(list(cache.glob("*/*.part"))) == 5)  # four workers and the reader
    started = time.monotonic()
    store.close()
    reader.join(5)
    assert time.monotonic() - started < 2
    assert "closed" in str(failures[0])
    assert not fetch_threads()
    assert not list(cache.glob("*/*.part"))
    assert not list(cache.glob("fetching-*"))
    with pytest.raises(DataError, match="was closed"):
        store.folder_of(shards[0])
    store.close()


def test_a_store_from_before_a_fork_says_so(server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_remote(server.url, cache)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    with pytest.raises(DataError, match="before a fork"):
        store.manifest()


# A full disk


@pytest.mark.usefixtures("short_grace")
@pytest.mark.parametrize("times", [1, 2])
def test_a_full_disk_is_cleared_once(server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
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


def test_a_cache_that_cannot_be_written_says_so(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be a cache"):
        open_remote(server.url, tmp_path / "file")


# Other addresses


def test_a_command_is_a_source(cache: Path, home: Path) -> None:
    assert_reads_like(open_remote(f"pipe:cat {home}/{{}}", cache), home)


def test_a_command_that_fails_at_times_is_run_again(cache: Path, home: Path, tmp_path: Path) -> None:
    script = tmp_path / "flaky.sh"
    # The first run of each file prints rubbish and fails, the second is cut short with exit code 0 (tars only).
    script.write_text(
        f'seen={tmp_path}/$(echo "$1" | tr / _)\n'
        f"if [ ! -e $seen ]; then touch $seen; echo rubbish; exit 3; fi\n"
        f'case "$1" in *.tar) if [ ! -e $seen.2 ]; then touch $seen.2; head -c 100 {home}/$1; exit 0; fi;; esac\n'
        f"cat {home}/$1\n"
    )
    store = open_remote(f"pipe:sh {script} {{}}", cache)
    assert_reads_like(store, home)
    assert store.stats()["retries"] >= 2 * SHARDS


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("sh -c 'echo no luck >&2; exit 7' {}", r"manifest\.json from pipe:sh .*exit code 7: no luck; given up"),
        ("no-such-program {}", "cannot run 'no-such-program': No such file"),
        ("cat somewhere", "has no {}"),
        ("cat 'somewhere", "cannot be split into words"),
        ("", "has no {}"),
        ("yes {}", "sends more than"),
    ],
)
def test_a_command_that_fails_is_told_with_its_reason(
    cache: Path, command: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "MOST_UNKNOWN", 1 << 20)
    with pytest.raises(DataError, match=said):
        open_remote(f"pipe:{command}", cache, retries=1).manifest()


def test_no_shell_sees_the_command(cache: Path, home: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="exit code 1"):
        open_remote(f"pipe:cat {home}/{{}} ; touch {tmp_path}/made", cache, retries=0).manifest()
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_other_file_systems_of_fsspec_work(cache: Path, home: Path, scheme: str) -> None:
    root = f"file://{home}"
    if scheme == "memory":
        root = "memory://test-remote/train"
        memory = fsspec.filesystem("memory")
        for path in home.rglob("*"):
            if path.is_file():
                memory.pipe_file(f"/test-remote/train/{path.relative_to(home)}", path.read_bytes())
    store = open_remote(root, cache)
    assert store.list_labels() == ["clean", "given"]
    assert_reads_like(store, home)
    missing = open_remote(root + "/nothing", cache)
    with pytest.raises(DataError, match=r"nothing/manifest\.json: not found"):
        missing.manifest()


def test_a_missing_backend_names_the_package(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    with pytest.raises(DataError, match=r"s3://bucket/train: reading s3:// needs a package: pip install 's3fs'"):
        open_remote("s3://bucket/train", cache)
    with pytest.raises(DataError, match="gopher://x: cannot be opened: Protocol not known"):
        open_remote("gopher://x", cache)


def test_open_store_tells_folders_from_addresses(
    server: Server, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert isinstance(open_store(home), LocalStore)
    assert isinstance(open_store(str(home)), LocalStore)
    store = open_store(server.url)
    assert isinstance(store, RemoteStore)
    assert_reads_like(store, home)
    assert len(cached_tars(tmp_path / "sopdist")) == SHARDS
    assert isinstance(open_store(f"pipe:cat {home}/{{}}", tmp_path / "other", PLENTY), RemoteStore)


# Secrets


SECRETS = ("hunter2", "abc123", "deadbeef", "s3cr3t")


def test_credentials_are_used_and_never_shown(server: Server, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    query = "token=abc123&X-Amz-Signature=deadbeef"
    address = f"http://me:hunter2@{server.address}"
    server.faults[shard_name(0)] = [500, DROP, WRONG]
    server.faults["manifest.json"] = [WRONG]
    store = open_remote(f"{address}?{query}", cache)
    texts = [store.root]
    with Split(store) as split:
        for index in range(0, len(split), SAMPLES):
            split.image(index)
        with pytest.raises(DataError) as caught:
            split.image(10**6)
        texts.append(str(caught.value))
        for status in (404, 403, 500):
            server.always["labels/given.json"] = status
            with pytest.raises(DataError) as caught:
                split.labels("given")
            texts.append(str(caught.value))
    assert server.queries == {query}
    assert all(value and value.startswith("Basic ") for value in server.authorizations)
    with pytest.raises(DataError) as caught:
        open_remote(f"{address.replace(':hunter2', ':hunter2@x')}.invalid/x?{query}", cache, retries=1).manifest()
    texts.append(str(caught.value))
    command = f"sh -c 'echo Authorization: Bearer s3cr3t {address}/x?{query} >&2; exit 1' --key=s3cr3t {address}/{{}}"
    with pytest.raises(DataError) as caught:
        open_remote(f"pipe:{command}", cache, retries=1).manifest()
    texts.append(str(caught.value))
    assert len(caplog.records) >= 3
    for text in [*texts, caplog.text]:
        assert not any(secret in text for secret in SECRETS), text


def test_secrets_are_blotted_out() -> None:
    assert without_secrets("https://me:pass@host/a?sig=1") == "https://***@host/a?***"
    assert (
        without_secrets("message='Not Found', url='http://host/a?token=b'")
        == "message='Not Found', url='http://host/a?***'"
    )
    assert without_secrets("s3://bucket/train/shard-000000.tar") == "s3://bucket/train/shard-000000.tar"


def test_retries_are_logged_but_not_each(server: Server, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    server.faults["manifest.json"] = [500, 503, 500]
    with open_remote_closing(server.url, cache) as store:
        store.manifest()
        assert store.stats()["retries"] == 3
    (record,) = caplog.records
    assert record.name == "sopdist.data"
    assert "manifest.json: HTTP 500 Internal Server Error; try 2 of 6 in 0.0 s" in record.getMessage()
