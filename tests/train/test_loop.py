"""The training loop: seeds of random layers, stops and saves within an epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sopdist.checkpoint import complete_checkpoints
from sopdist.checkpoint.folder import step_of
from sopdist.train.distributed.stop_requests import PreemptedError
from sopdist.train.loop import dropout_seed
from tests.support.opened_run import SAMPLES, STEPS, OpenedRun, break_at, open_run
from tests.support.small_splits import samples, write_split

EPOCHS: dict[str, Any] = {"epochs": 2}


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards") / "train"
    write_split(folder, samples(SAMPLES), per_shard=6)
    return folder


def record_seeds(run: OpenedRun) -> list[int]:
    """The seed of torch's generator in each forward pass of training."""
    seeds: list[int] = []
    run.session.engine.network.register_forward_pre_hook(
        lambda module, _: seeds.append(torch.initial_seed()) if module.training else None
    )
    return seeds


def saved_steps(run: OpenedRun) -> list[int]:
    run.saver.wait()
    return [step_of(path) for path in complete_checkpoints(run.session.folder)]


def test_a_resumed_run_has_the_dropout_seeds_of_an_uninterrupted_run(split: Path, tmp_path: Path) -> None:
    stop = STEPS + 1
    with open_run(split, tmp_path / "uninterrupted", train=EPOCHS, checkpoint={"every": 0, "steps": stop}) as run:
        uninterrupted = record_seeds(run)
        run.train()
        assert saved_steps(run) == [stop]
        (saved,) = complete_checkpoints(run.session.folder)
    with open_run(split, tmp_path / "resumed", resume_from=saved, train=EPOCHS) as run:
        resumed = record_seeds(run)
        run.train()
    assert len(set(uninterrupted)) == 2 * STEPS
    assert resumed == uninterrupted[stop:]


def test_seeds_differ_between_ranks_steps_and_runs() -> None:
    seeds = {dropout_seed(seed, step, rank) for seed in range(4) for step in range(50) for rank in range(8)}
    assert len(seeds) == 4 * 50 * 8


def test_a_stop_within_an_epoch_saves_discards_prefetched_rows_and_raises(
    split: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_run(split, tmp_path, train=EPOCHS) as run:
        calls: list[str] = []
        save = run.saver.save
        monkeypatch.setattr(run.saver, "save", lambda: (calls.append("save"), save()))  # type: ignore[func-returns-value]
        monkeypatch.setattr(run.session.method, "discard_prefetched", lambda: calls.append("discard"))
        run.session.requests.reason = "the test"
        with pytest.raises(PreemptedError):
            run.train()
        assert run.progress.step == 1
        assert calls == ["save", "discard"]
        assert saved_steps(run) == [1]


def test_nothing_is_saved_within_an_epoch_while_steps_are_not_finite(split: Path, tmp_path: Path) -> None:
    with open_run(split, tmp_path, train=EPOCHS, checkpoint={"every": 0, "steps": 1, "keep": 99}) as run:
        break_at(run.session, {1: None, 3: None})  # a step within the first epoch, and the first of the second
        run.train()
        assert saved_steps(run) == [1, 3, 5, 6]
