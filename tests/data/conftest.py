"""A small split that several test modules read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.small_splits import write_split
from tests.support.streams import pictures


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shards") / "train"
    write_split(path, pictures(), per_shard=9)
    return path
