"""Streaming a remote split over a bad connection: the same batches as from a folder, or an error with the reason."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from sopdist.data.batch import Batch
from sopdist.data.settings import DataSettings
from sopdist.data.stream import Stream
from sopdist.errors import DataError, StoreError
from tests.support.http_server import DROP, HANG, Server
from tests.support.remote_splits import limit_for


def batches(root: str, cache: Path, limit: int = 0, *, backend: str = "cpu", start: int = 0) -> list[Batch]:
    settings = DataSettings(root, "cifar10", backend=backend, threads=2, cache=str(cache), cache_bytes=limit, block=1)
    with Stream(settings, global_batch=7, seed=5) as stream:
        return list(stream.epoch(1, start))


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("sopdist")]


@pytest.mark.parametrize("backend", ["cpu", "dali"])
@pytest.mark.parametrize("shards", [3.5, 50])
def test_batches_equal_those_of_the_folder_through_drops_and_a_small_cache(
    server: Server, cache: Path, local_split: Path, backend: str, shards: float
) -> None:
    for number in range(4):
        server.faults[f"shard-{number:06d}.tar"] = [DROP]
    local = batches(str(local_split), cache, backend=backend)
    remote = batches(server.url, cache, limit_for(local_split, shards), backend=backend)
    assert len(remote) == len(local)
    for found, expected in zip(remote, local, strict=True):
        assert torch.equal(found.images, expected.images)
        assert torch.equal(found.index, expected.index)
    resumed = batches(server.url, cache, limit_for(local_split, shards), backend=backend, start=3)
    assert torch.equal(resumed[0].images, local[3].images)


def test_a_server_failure_stops_the_run_and_marks_no_sample_as_bad(server: Server, cache: Path) -> None:
    server.always["shard-000002.tar"] = 404
    with pytest.raises(StoreError, match=r"shard-000002\.tar"):
        batches(server.url, cache)
    assert our_threads() == []


def test_closing_during_an_epoch_stops_the_downloads(server: Server, cache: Path) -> None:
    settings = DataSettings(server.url, "cifar10", backend="cpu", cache=str(cache))
    with Stream(settings, global_batch=4) as stream:
        for _ in stream.epoch(0):
            break
    assert our_threads() == []


def test_a_wrong_address_is_an_error_before_any_thread_starts(server: Server, cache: Path) -> None:
    with pytest.raises(DataError, match=r"manifest\.json"):
        batches(server.url + "/nowhere", cache)
    assert our_threads() == []


def test_an_unresponsive_server_delays_neither_close_nor_the_exit_of_the_process(server: Server, cache: Path) -> None:
    for number in range(6):
        server.always[f"shard-{number:06d}.tar"] = HANG
    program = f"""
import os, signal, threading
from sopdist.data.settings import DataSettings
from sopdist.data.stream import Stream
stream = Stream(DataSettings({server.url!r}, "cifar10", backend="cpu", cache={str(cache)!r}), global_batch=4)
batches = stream.epoch(0)
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    next(batches)
except KeyboardInterrupt:
    print("interrupted")
"""
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("interrupted\n", 0)
