"""A split at home, and a server that offers it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sopdist.data.labels import write_labels
from sopdist.data.remote import cache as caches
from sopdist.data.remote import transfer
from tests.data.http_server import Server
from tests.data.pictures import encoded, picture
from tests.data.small_splits import sample, write_split

from .far import (
    PIECE,
    SAMPLES,
    SHARDS,
)


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
    monkeypatch.setattr(caches, "_GRACE", 0.05)
