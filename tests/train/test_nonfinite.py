"""The guard against a loss that is not finite: when it tolerates a step, when it stops, and what it reports then."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sopdist.data.batch import Batch
from sopdist.train.nonfinite import NonFiniteError, NonFiniteGuard
from tests.support.opened_run import SAMPLES, STEPS, OpenedRun, break_at, open_run
from tests.support.small_splits import samples, write_split


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards") / "train"
    write_split(folder, samples(SAMPLES), per_shard=6)
    return folder


@pytest.mark.parametrize("method", ["ce", "sop"])
def test_single_steps_that_are_not_finite_are_tolerated_reported_and_counted(
    split: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    with open_run(split, tmp_path, method={"name": method}) as run:
        break_at(run.session, {1: None, 4: 2, 5: 0})  # 4 and 5 are two consecutive steps, as many as are allowed
        with caplog.at_level(logging.WARNING):
            run.train()
        assert run.progress.step == 4 * STEPS
        assert [line["nonfinite"] for line in run.lines()] == [0, 8, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0]
        assert all(torch.isfinite(value).all() for value in run.session.engine.network_state().values())
    reported = [record.getMessage() for record in caplog.records if "non-finite loss" in record.getMessage()]
    assert reported == [
        "step 1: 8 samples have a non-finite loss and are excluded",
        "step 4: 1 samples have a non-finite loss and are excluded",
    ]


def test_samples_that_are_not_finite_do_not_change_the_network(split: Path, tmp_path: Path) -> None:
    """A step in which no sample is finite leaves the network as a step with a learning rate of 0 does."""
    weights = []
    for name, calls in (("all", {0: None}), ("none", {})):
        settings = {"lr": 0.5 if name == "all" else 0.0, "momentum": 0.0, "weight_decay": 0.0}
        with open_run(split, tmp_path / name, optim=settings, train={"max_steps": 1}) as run:
            break_at(run.session, calls)
            run.train()
            weights.append(dict(run.session.engine.network.named_parameters()))
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name]), name


def test_too_many_nonfinite_steps_in_a_row_end_the_run_and_the_last_one_is_dumped(split: Path, tmp_path: Path) -> None:
    with open_run(split, tmp_path) as run:
        break_at(run.session, {0: None, 2: None, 3: 1, 4: None})
        with pytest.raises(NonFiniteError) as caught:
            run.train()
        rows = run.session.stream.plan(1).batches
        dump = json.loads((run.session.folder / "nonfinite-step-4.json").read_text())
    assert (dump["step"], dump["epoch"], dump["consecutive_steps"]) == (4, 1, 3)
    assert [sample["index"] for sample in dump["samples"]] == rows[1].tolist()
    assert all(sample["label"] == sample["index"] % 3 and sample["rank"] == 0 for sample in dump["samples"])
    assert all(f"shard-{sample['index'] // 6:06d}.tar" in sample["where"] for sample in dump["samples"])
    message = str(caught.value)
    assert (
        "for 3 consecutive steps (train.max_nonfinite_steps = 2); the last is step 4, epoch 1, with 8 samples"
        in message
    )
    assert "index " + ", ".join(map(str, rows[1].tolist())) in message
    assert str(tmp_path / "run" / "nonfinite-step-4.json") in message


def test_only_the_samples_of_the_bad_micro_batch_are_named(split: Path, tmp_path: Path) -> None:
    with open_run(split, tmp_path, train={"accumulate": 4, "max_nonfinite_steps": 0}) as run:
        break_at(run.session, {6: 1})  # the third micro-batch, of samples 4 and 5, of the second step
        with pytest.raises(NonFiniteError, match="for 1 consecutive steps"):
            run.train()
        expected = int(run.session.stream.plan(0).batches[1][5])
        dump = json.loads((run.session.folder / "nonfinite-step-1.json").read_text())
    assert [sample["index"] for sample in dump["samples"]] == [expected]


def test_a_dump_that_cannot_be_written_does_not_hide_the_reason(split: Path, tmp_path: Path) -> None:
    with open_run(split, tmp_path, train={"max_nonfinite_steps": 0}) as run:
        break_at(run.session, {0: None})
        run.reporter.run_log = None  # it would complain about its files
        shutil.rmtree(run.session.folder)
        with pytest.raises(NonFiniteError, match=r"the last is step 0, .* cannot be written: .*No such file"):
            run.train()


@pytest.fixture(scope="module")
def any_run(split: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenedRun]:
    with open_run(split, tmp_path_factory.mktemp("runs")) as run:
        yield run


def first_stop(steps: list[bool], allowed: int) -> int | None:
    """By brute force: the first step that ends more than `allowed` consecutive bad ones."""
    for step in range(allowed, len(steps)):
        if all(steps[step - allowed : step + 1]):
            return step
    return None


@given(st.lists(st.booleans(), min_size=1, max_size=14), st.integers(1, 5))
def test_the_guard_stops_at_the_first_step_over_the_limit_for_any_epoch_length(
    any_run: OpenedRun, steps: list[bool], epoch: int
) -> None:
    progress = any_run.progress
    guard = NonFiniteGuard(any_run.session, progress)
    progress.nonfinite_streak, stopped = 0, None
    try:
        for step, bad in enumerate(steps):
            progress.step = step
            guard.check(guard.previous())
            micro_batch = Batch(torch.zeros(2, 3, 32, 32), torch.tensor([0, 1]), torch.tensor([0, 1]), torch.ones(2))
            guard.watch(micro_batch, torch.tensor([bad, False]))
            progress.step = step + 1
            if (step + 1) % epoch == 0 or step + 1 == len(steps):
                guard.flush()
    except NonFiniteError:
        stopped = progress.step - 1
    assert stopped == first_stop(steps, 2)
