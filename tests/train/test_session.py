"""A session: fixed once it is open, and released completely if it cannot be opened."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from sopdist.train.distributed.stop_requests import Requests
from sopdist.train.distributed.world import CollectiveError
from sopdist.train.session import lock_run_folder, open_session
from tests.support.opened_run import SAMPLES, make_config, one_rank, open_run
from tests.support.small_splits import samples, write_split


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards") / "train"
    write_split(folder, samples(SAMPLES), per_shard=6)
    return folder


def test_a_session_is_frozen(split: Path, tmp_path: Path) -> None:
    with open_run(split, tmp_path) as run, pytest.raises(FrozenInstanceError):
        run.session.clean_labels = None  # type: ignore[misc]


def test_a_session_that_cannot_be_opened_releases_the_lock(split: Path, tmp_path: Path) -> None:
    config = make_config(split, tmp_path, data={"labels": "nope"})
    with one_rank(config) as world:
        lock = lock_run_folder(config, world, resume=False)
        with pytest.raises(CollectiveError, match="no label set 'nope'"):
            open_session(config, world, Requests("python"), lock)
        assert lock.file is not None
        assert lock.file.closed
        lock_run_folder(config, world, resume=False).close()


@pytest.mark.parametrize(
    ("method", "views"), [({"name": "ce"}, 1), ({"name": "sop"}, 1), ({"name": "sop", "consistency": 0.5}, 2)]
)
def test_the_strong_view_is_opened_only_if_the_method_wants_one(
    split: Path, tmp_path: Path, method: dict[str, object], views: int
) -> None:
    with open_run(split, tmp_path, method=method) as run:
        batch = next(iter(run.session.stream.epoch(0)))
        assert len(batch.other_views) == views - 1
