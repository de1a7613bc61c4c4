"""A split that several files of tests read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.small_splits import write_split
from tests.data.streams import pictures


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("shards") / "train"
    write_split(place, pictures(), per_shard=9)
    return place
