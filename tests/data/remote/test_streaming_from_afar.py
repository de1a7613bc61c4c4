"""A stream over a bad connection: the same batches as from a folder, or a stop that says why."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from sopdist.data.batch import Batch
from sopdist.data.errors import DataError, StoreError
from sopdist.data.settings import DataSettings
from sopdist.data.stream import Stream
from tests.data.http_server import DROP, Server

from .far import limit_for


def batches(root: str, cache: Path, limit: int = 0, *, backend: str = "cpu", start: int = 0) -> list[Batch]:
    settings = DataSettings(root, "cifar10", backend=backend, threads=2, cache=str(cache), cache_bytes=limit, block=1)
    with Stream(settings, global_batch=7, seed=5) as stream:
        return list(stream.epoch(1, start))


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("sopdist")]


@pytest.mark.parametrize("backend", ["cpu", "dali"])
@pytest.mark.parametrize("shards", [3.5, 50])
def test_batches_equal_those_of_the_folder_through_drops_and_a_small_cache(
    server: Server, cache: Path, home: Path, backend: str, shards: float
) -> None:
    for number in range(4):
        server.faults[f"shard-{number:06d}.tar"] = [DROP]
    local = batches(str(home), cache, backend=backend)
    far = batches(server.url, cache, limit_for(home, shards), backend=backend)
    assert len(far) == len(local)
    for ours, theirs in zip(far, local, strict=True):
        assert torch.equal(ours.images, theirs.images)
        assert torch.equal(ours.index, theirs.index)
    resumed = batches(server.url, cache, limit_for(home, shards), backend=backend, start=3)
    assert torch.equal(resumed[0].images, local[3].images)


def test_a_server_that_fails_stops_the_run_and_blames_no_sample(server: Server, cache: Path) -> None:
    server.always["shard-000002.tar"] = 404
    with pytest.raises(StoreError, match=r"shard-000002\.tar"):
        batches(server.url, cache)
    assert our_threads() == []


def test_an_epoch_left_early_stops_the_downloads(server: Server, cache: Path) -> None:
    settings = DataSettings(server.url, "cifar10", backend="cpu", cache=str(cache))
    with Stream(settings, global_batch=4) as stream:
        for _ in stream.epoch(0):
            break
    assert our_threads() == []


def test_a_wrong_address_is_an_error_before_anything_starts(server: Server, cache: Path) -> None:
    with pytest.raises(DataError, match=r"manifest\.json"):
        batches(server.url + "/nowhere", cache)
    assert our_threads() == []
