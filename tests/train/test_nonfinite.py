"""The guard against a loss that is not finite: when it forgives, when it stops, and what it says then."""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from sopdist.config import build
from sopdist.data.batch import Batch
from sopdist.train.checkpoint import Saver
from sopdist.train.config import Config
from sopdist.train.loop import train
from sopdist.train.nonfinite import NonFiniteError, NonFiniteGuard
from sopdist.train.preemption import Requests
from sopdist.train.session import Session, begin_record, claim_run, open_session
from sopdist.train.world import Place, open_world
from tests.data.small_splits import samples, write_split

SAMPLES, BATCH, STEPS = 24, 8, 3  # of an epoch


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards") / "train"
    write_split(folder, samples(SAMPLES), per_shard=6)
    return folder


@contextmanager
def opened(split: Path, folder: Path, **changes: Any) -> Iterator[Session]:
    """A session of one rank whose network is a linear one."""
    tree: dict[str, Any] = {
        "run": {"name": "run", "folder": str(folder)},
        "data": {"root": str(split), "recipe": "cifar10", "threads": 1},
        "model": {"name": "mlp"}, "train": {"epochs": 4, "batch": BATCH, "max_nonfinite_steps": 2},
        "engine": {"threads": 1}, "checkpoint": {"every": 0}, "log": {"wandb": "off", "every": 1},
    }  # fmt: skip
    for section, values in changes.items():
        tree[section] = tree.get(section, {}) | values
    config = build(Config, tree)
    world = open_world(Place(), config.engine)
    session = open_session(config, world, Requests("python"), claim_run(config, world, resume=False))
    begin_record(session, resume=False)
    try:
        yield session
    finally:
        session.close()
        world.close()


def break_at(session: Session, calls: dict[int, int | None]) -> None:
    """Let the network's n-th call while training answer NaN: for one sample, or (None) for all."""
    count = [-1]

    def spoil(module: nn.Module, _: Any, logits: Tensor) -> Tensor:
        if not module.training:
            return logits
        count[0] += 1
        if count[0] not in calls:
            return logits
        place = calls[count[0]]
        bad = torch.zeros(len(logits), 1, dtype=torch.bool)
        bad[slice(None) if place is None else place] = True
        return logits.masked_fill(bad, math.nan)

    session.engine.network.register_forward_hook(spoil)


def trained_lines(session: Session) -> list[dict[str, Any]]:
    lines = (session.folder / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["kind"] == "train"]


@pytest.mark.parametrize("objective", ["ce", "sop"])
def test_single_steps_that_are_not_finite_are_forgiven_told_and_counted(
    split: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, objective: str
) -> None:
    with opened(split, tmp_path, objective={"name": objective}) as session:
        break_at(session, {1: None, 4: 2, 5: 0})  # 4 and 5 are two in a row, as many as are allowed
        with caplog.at_level(logging.WARNING):
            train(session, Saver(session))
        assert session.step == 4 * STEPS
        assert [line["nonfinite"] for line in trained_lines(session)] == [0, 8, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0]
        assert all(torch.isfinite(value).all() for value in session.engine.network_state().values())
    told = [record.getMessage() for record in caplog.records if "NOT FINITE" in record.getMessage()]
    assert told == [
        "step 1: NOT FINITE: 8 samples are left out of the loss",
        "step 4: NOT FINITE: 1 samples are left out of the loss",
    ]


def test_a_sample_that_is_not_finite_moves_nothing(split: Path, tmp_path: Path) -> None:
    """The network after a step without it, and after a step with it of weight 0, is the same."""
    weights = []
    for name, calls in (("all", {0: None}), ("none", {})):
        settings = {"lr": 0.5 if name == "all" else 0.0, "momentum": 0.0, "weight_decay": 0.0}
        with opened(split, tmp_path / name, optim=settings, train={"max_steps": 1}) as session:
            break_at(session, calls)
            train(session, Saver(session))
            weights.append(dict(session.engine.network.named_parameters()))
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name]), name


def test_too_many_in_a_row_end_the_run_with_the_samples_of_the_last_step(split: Path, tmp_path: Path) -> None:
    with opened(split, tmp_path) as session:
        break_at(session, {0: None, 2: None, 3: 1, 4: None})
        with pytest.raises(NonFiniteError) as caught:
            train(session, Saver(session))
        rows = session.stream.plan(1).rows
        dump = json.loads((session.folder / "nonfinite-step-4.json").read_text())
    assert (dump["step"], dump["epoch"], dump["steps in a row"]) == (4, 1, 3)
    assert [sample["index"] for sample in dump["samples"]] == rows[1].tolist()
    assert all(sample["label"] == sample["index"] % 3 and sample["rank"] == 0 for sample in dump["samples"])
    assert all(f"shard-{sample['index'] // 6:06d}.tar" in sample["where"] for sample in dump["samples"])
    message = str(caught.value)
    assert (
        "for 3 steps in a row (train.max_nonfinite_steps = 2); the last is step 4, epoch 1, with 8 samples" in message
    )
    assert "index " + ", ".join(map(str, rows[1].tolist())) in message
    assert str(tmp_path / "run" / "nonfinite-step-4.json") in message


def test_only_the_samples_of_the_bad_piece_are_named(split: Path, tmp_path: Path) -> None:
    with opened(split, tmp_path, train={"accumulate": 4, "max_nonfinite_steps": 0}) as session:
        break_at(session, {6: 1})  # the third piece, of samples 4 and 5, of the second step
        with pytest.raises(NonFiniteError, match="for 1 steps in a row"):
            train(session, Saver(session))
        expected = int(session.stream.plan(0).rows[1][5])
        dump = json.loads((session.folder / "nonfinite-step-1.json").read_text())
    assert [sample["index"] for sample in dump["samples"]] == [expected]


def test_a_dump_that_cannot_be_written_does_not_hide_the_reason(split: Path, tmp_path: Path) -> None:
    with opened(split, tmp_path, train={"max_nonfinite_steps": 0}) as session:
        break_at(session, {0: None})
        session.journal = None  # it would complain about its files
        shutil.rmtree(session.folder)
        with pytest.raises(NonFiniteError, match=r"the last is step 0, .* cannot be written: .*No such file"):
            train(session, Saver(session))


@pytest.fixture(scope="module")
def any_session(split: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    with opened(split, tmp_path_factory.mktemp("runs")) as session:
        yield session


def first_end(steps: list[bool], allowed: int) -> int | None:
    """By brute force: the first step that ends more than `allowed` bad ones in a row."""
    for step in range(allowed, len(steps)):
        if all(steps[step - allowed : step + 1]):
            return step
    return None


@given(st.lists(st.booleans(), min_size=1, max_size=14), st.integers(1, 5))
def test_whatever_the_epochs_are_the_guard_stops_at_the_step_that_is_one_too_many(
    any_session: Session, steps: list[bool], epoch: int
) -> None:
    guard, session = NonFiniteGuard(any_session), any_session
    session.nonfinite_streak, stopped = 0, None
    try:
        for step, bad in enumerate(steps):
            session.step = step
            guard.check(guard.previous())
            piece = Batch(torch.zeros(2, 3, 32, 32), torch.tensor([0, 1]), torch.tensor([0, 1]), torch.ones(2))
            guard.watch(piece, torch.tensor([bad, False]))
            session.step = step + 1
            if (step + 1) % epoch == 0 or step + 1 == len(steps):
                guard.flush()
    except NonFiniteError:
        stopped = session.step - 1
    assert stopped == first_end(steps, 2)
