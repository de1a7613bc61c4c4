"""A local split, and a server that serves it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sopdist.data.labels import write_labels
from sopdist.data.remote import cache as caches
from sopdist.data.remote import transfer
from tests.support.http_server import Server
from tests.support.pictures import encoded, picture
from tests.support.remote_splits import CHUNK, SAMPLES, SHARDS
from tests.support.small_splits import sample, write_split


@pytest.fixture(scope="module")
def local_split(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A split on this machine, which all remote reads are compared with."""
    folder = tmp_path_factory.mktemp("split")
    members = [sample(index, image=encoded(picture(index), quality=95)) for index in range(SHARDS * SAMPLES)]
    manifest = write_split(folder, members, per_shard=SAMPLES)
    write_labels(folder, manifest, "clean", np.zeros(manifest.samples, dtype=np.int64), {"kind": "test"})
    return folder


@pytest.fixture
def server(local_split: Path) -> Iterator[Server]:
    with Server(local_split) as server:
        yield server


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_CHUNK", CHUNK)
    monkeypatch.setattr(transfer, "_MIN_CHUNK", CHUNK // 4)


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "_GRACE", 0.05)
