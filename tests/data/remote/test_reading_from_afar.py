"""Reading a split from far away: the same samples as at home, whatever the connection does."""

from __future__ import annotations

import logging
import sys
import threading
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from sopdist.data.errors import DataError, StoreError
from sopdist.data.labels import read_labels, write_labels
from sopdist.data.manifest import shard_name
from sopdist.data.remote import transfer
from sopdist.data.remote.opening import open_store
from sopdist.data.remote.store import RemoteStore
from sopdist.data.remote.transfer import without_secrets
from sopdist.data.split import Split
from sopdist.data.store import LocalStore
from tests.data.http_server import CLIP, CUT, DROP, WRONG, Server

from .far import (
    PIECE,
    PLENTY,
    SAMPLES,
    SHARDS,
    assert_reads_like,
    cached_tars,
    open_remote,
    open_remote_closing,
    wait_for,
)


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
    with pytest.raises(StoreError, match="SHA-256"):
        store.folder_of(info)
    assert server.requests[info.name] == 2, "it is not fetched again and again"
    store.close()
    server.always.clear()  # repaired: a new store goes on
    with open_remote_closing(server.url, cache) as repaired:
        assert (repaired.folder_of(info) / info.name).exists()


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
