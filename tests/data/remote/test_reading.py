"""Reading a remote split: the same samples as from the local one, in spite of connection failures."""

from __future__ import annotations

import logging
import sys
import threading
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from sopdist.data.labels import read_labels, write_labels
from sopdist.data.manifest import shard_name
from sopdist.data.remote import transfer
from sopdist.data.remote.opening import open_store
from sopdist.data.remote.store import RemoteStore
from sopdist.data.remote.transfer import redact_secrets
from sopdist.data.split import Split
from sopdist.data.store import LocalStore
from sopdist.errors import DataError, StoreError
from tests.support.http_server import CLIP, CUT, DROP, WRONG, Server
from tests.support.remote_splits import (
    CHUNK,
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
def test_remote_samples_and_labels_equal_the_local_ones(
    server: Server, cache: Path, local_split: Path, ahead: bool
) -> None:
    store = open_remote(server.url, cache)
    assert_reads_like(store, local_split, ahead)
    assert store.stats()["retries"] == 0
    assert max(server.requests.values()) == 1


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("fault", [DROP, CUT, CLIP, 500, 503, 429])
def test_a_bad_connection_costs_retries_and_nothing_else(
    server: Server, cache: Path, local_split: Path, fault: str | int
) -> None:
    for path in ("manifest.json", "labels/given.npy", *(shard_name(number) for number in range(SHARDS))):
        server.faults[path] = [fault, fault]
    store = open_remote(server.url, cache)
    if fault == CLIP:  # without a known size, truncation is detected only in the contents
        server.faults["manifest.json"] = server.faults["labels/given.npy"] = [fault]
    assert_reads_like(store, local_split)
    assert store.stats()["retries"] >= 2 * SHARDS


@pytest.mark.usefixtures("small_chunks")
def test_a_dropped_connection_costs_a_chunk_and_not_the_file(server: Server, cache: Path) -> None:
    name = shard_name(0)
    server.faults[name] = [CLIP, DROP, 503]
    store = open_remote(server.url, cache)
    info = store.manifest().shards[0]
    store.folder_of(info)
    chunks = -(-info.bytes // CHUNK)
    assert chunks > 2
    assert server.requests[name] <= chunks + 5  # after each failure a smaller chunk or two
    store.close()


@pytest.mark.usefixtures("small_chunks")
def test_a_connection_that_always_breaks_early_still_makes_progress(
    server: Server, cache: Path, local_split: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = transfer.Transfer._call

    def breaks_beyond_2k(self: transfer.Transfer, method: str, path: str, **arguments: Any) -> Any:
        if path.endswith(".tar") and arguments["end"] - arguments["start"] > CHUNK // 4:
            raise ConnectionResetError("too long")
        return call(self, method, path, **arguments)

    monkeypatch.setattr(transfer.Transfer, "_call", breaks_beyond_2k)
    assert_reads_like(open_remote(server.url, cache), local_split)


@pytest.mark.usefixtures("small_chunks")
def test_a_server_without_ranges_sends_each_file_once(cache: Path, local_split: Path) -> None:
    with Server(local_split, ranges=False) as server:
        assert_reads_like(open_remote(server.url, cache), local_split)
        assert max(server.requests.values()) == 1


@pytest.mark.usefixtures("small_chunks")
def test_a_server_without_ranges_may_drop_connections(cache: Path, local_split: Path) -> None:
    with Server(local_split, ranges=False) as server:
        server.faults[shard_name(1)] = [DROP, CUT]
        assert_reads_like(open_remote(server.url, cache), local_split)
        assert server.requests[shard_name(1)] == 3


@pytest.mark.parametrize("content", [b"", b"x", b"x" * (CHUNK - 1), b"x" * CHUNK, b"xy" * CHUNK, b"x" * (CHUNK + 1)])
@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("ranges", [True, False])
def test_files_of_unknown_size_are_complete(tmp_path: Path, content: bytes, ranges: bool) -> None:
    (tmp_path / "file+1").write_bytes(content)
    with Server(tmp_path, ranges) as server:
        remote = transfer.Transfer(server.url, threading.Event(), retries=0)
        if content or not ranges:
            assert remote.fetch_bytes("file+1") == content
        else:
            with pytest.raises(DataError, match="416"):
                remote.fetch_bytes("file+1")


def test_a_file_of_unknown_size_is_refused_above_the_maximum(
    server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "MAX_UNKNOWN_SIZE", 100)
    with pytest.raises(DataError, match=r"manifest\.json: .* bytes, far too large"):
        open_remote(server.url, cache).manifest()


# Errors of the remote files


def test_a_file_with_a_wrong_checksum_is_downloaded_once_more(server: Server, cache: Path, local_split: Path) -> None:
    for path in ("manifest.json", "labels/given.npy", "labels/clean.json", "shard-000002.idx", shard_name(3)):
        server.faults[path] = [WRONG]
    assert_reads_like(open_remote(server.url, cache), local_split)
    assert server.requests[shard_name(3)] == 2


def test_a_file_whose_checksum_stays_wrong_is_named_and_not_cached(server: Server, cache: Path) -> None:
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
    assert server.requests[info.name] == 2, "it is not downloaded again"
    store.close()
    server.always.clear()  # repaired: a new store can read it
    with open_remote_closing(server.url, cache) as repaired:
        assert (repaired.folder_of(info) / info.name).exists()


@pytest.mark.parametrize(("status", "message"), [(404, "not found"), (403, "access denied"), (401, "access denied")])
def test_permanent_errors_are_not_retried(server: Server, cache: Path, status: int, message: str) -> None:
    server.always[shard_name(0)] = status
    with open_remote_closing(server.url, cache) as store:
        info = store.manifest().shards[0]
        with pytest.raises(DataError, match=rf"{server.address}/shard-000000\.tar: {message}"):
            store.folder_of(info)
    assert server.requests[info.name] == 1


def test_the_number_of_retries_is_limited(server: Server, cache: Path) -> None:
    server.always[shard_name(0)] = 500
    with open_remote_closing(server.url, cache, retries=3) as store:
        with pytest.raises(DataError, match=r"shard-000000\.tar: HTTP 500 .*gave up after 4 attempts"):
            store.folder_of(store.manifest().shards[0])
        assert store.stats()["retries"] == 3


def test_a_shard_that_failed_to_prefetch_fails_when_requested_and_the_others_are_cached(
    server: Server, cache: Path
) -> None:
    server.always[shard_name(0)] = 404
    with open_remote_closing(server.url, cache) as store:
        shards = store.manifest().shards
        store.expect(shards)
        wait_for(lambda: len(cached_tars(cache)) == SHARDS - 1)
        with pytest.raises(DataError, match="not found"):
            store.folder_of(shards[0])
        store.folder_of(shards[1])
        assert server.requests[shard_name(1)] == 1


def test_a_wrong_address_is_named(server: Server, cache: Path) -> None:
    with pytest.raises(DataError, match=r"nothing/manifest\.json: not found; is the address right"):
        open_remote(f"{server.url}/nothing", cache).manifest()
    server.always["manifest.json"] = WRONG
    with pytest.raises(DataError, match=r"manifest\.json: not JSON"):
        open_remote(server.url, cache).manifest()


# Labels


def test_label_sets_are_listed_cached_and_refreshed(
    server: Server, cache: Path, local_split: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    (copy / "labels").mkdir(parents=True)
    for path in local_split.glob("**/*.[jn][sp]*"):
        (copy / path.relative_to(local_split)).write_bytes(path.read_bytes())
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
        with pytest.raises(DataError, match=r"no label set 'best'; available: clean, given"):
            store.labels(manifest, "best")
        with pytest.raises(DataError, match="label set name"):
            store.labels(manifest, "../given")
        server.listing = False
        assert store.list_labels() == []
        with pytest.raises(DataError, match="cannot be listed"):
            store.labels(manifest, "best")


# Commands and other file systems


def test_a_split_can_be_read_through_a_command(cache: Path, local_split: Path) -> None:
    assert_reads_like(open_remote(f"pipe:cat {local_split}/{{}}", cache), local_split)


def test_a_command_that_fails_sometimes_is_run_again(cache: Path, local_split: Path, tmp_path: Path) -> None:
    script = tmp_path / "flaky.sh"
    # The first run of each file prints rubbish and fails, the second is truncated with exit code 0 (tars only).
    script.write_text(
        f'cd {local_split}\nseen={tmp_path}/$(echo "$1" | tr / _)\n'
        "if [ ! -e $seen ]; then touch $seen; echo rubbish; exit 3; fi\n"
        'case "$1" in *.tar) if [ ! -e $seen.2 ]; then touch $seen.2; head -c 100 $1; exit 0; fi;; esac\n'
        "cat $1\n"
    )
    store = open_remote(f"pipe:sh {script} {{}}", cache)
    assert_reads_like(store, local_split)
    assert store.stats()["retries"] >= 2 * SHARDS


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("sh -c 'echo no luck >&2; exit 7' {}", r"manifest\.json from pipe:sh .*exit code 7: no luck; gave up"),
        ("no-such-program {}", "cannot run 'no-such-program': No such file"),
        ("cat somewhere", "has no {}"),
        ("cat 'somewhere", "cannot be split into words"),
        ("", "has no {}"),
        ("yes {}", "sends more than"),
    ],
)
def test_a_command_that_fails_is_reported_with_the_reason(
    cache: Path, command: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "MAX_UNKNOWN_SIZE", 1 << 20)
    with pytest.raises(DataError, match=message):
        open_remote(f"pipe:{command}", cache, retries=1).manifest()


def test_a_command_is_not_run_by_a_shell(cache: Path, local_split: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="exit code 1"):
        open_remote(f"pipe:cat {local_split}/{{}} ; touch {tmp_path}/made", cache, retries=0).manifest()
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_other_file_systems_of_fsspec_work(cache: Path, local_split: Path, scheme: str) -> None:
    root = f"file://{local_split}"
    if scheme == "memory":
        root = "memory://test-remote/train"
        memory = fsspec.filesystem("memory")
        for path in local_split.rglob("*"):
            if path.is_file():
                memory.pipe_file(f"/test-remote/train/{path.relative_to(local_split)}", path.read_bytes())
    store = open_remote(root, cache)
    assert store.list_labels() == ["clean", "given"]
    assert_reads_like(store, local_split)
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


def test_open_store_distinguishes_folders_from_addresses(
    server: Server, local_split: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert isinstance(open_store(local_split), LocalStore)
    assert isinstance(open_store(str(local_split)), LocalStore)
    store = open_store(server.url)
    assert isinstance(store, RemoteStore)
    assert_reads_like(store, local_split)
    assert len(cached_tars(tmp_path / "sopdist")) == SHARDS
    assert isinstance(open_store(f"pipe:cat {local_split}/{{}}", tmp_path / "other", PLENTY), RemoteStore)


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


def test_secrets_are_redacted() -> None:
    assert redact_secrets("https://me:pass@host/a?sig=1") == "https://***@host/a?***"
    assert (
        redact_secrets("message='Not Found', url='http://host/a?token=b'")
        == "message='Not Found', url='http://host/a?***'"
    )
    assert redact_secrets("s3://bucket/train/shard-000000.tar") == "s3://bucket/train/shard-000000.tar"


def test_retries_are_logged_at_a_limited_rate(server: Server, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    server.faults["manifest.json"] = [500, 503, 500]
    with open_remote_closing(server.url, cache) as store:
        store.manifest()
        assert store.stats()["retries"] == 3
    (record,) = caplog.records
    assert record.name == "sopdist.data"
    assert "manifest.json: HTTP 500 Internal Server Error; attempt 2 of 6 in 0.0 s" in record.getMessage()
