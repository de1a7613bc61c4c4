"""The reporter: measurements that a resumed run continues with, and too many unreadable samples."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sopdist.methods import StepOutput
from sopdist.train.distributed.world import CollectiveError
from sopdist.train.record.reporter import Reporter
from tests.support.opened_run import SAMPLES, OpenedRun, open_run
from tests.support.small_splits import sample, samples, write_split

BROKEN = 7


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards") / "train"
    members = [sample(i, image=b"no image") if i == BROKEN else member for i, member in enumerate(samples(SAMPLES))]
    write_split(folder, members, per_shard=6)
    return folder


def add_batches(run: OpenedRun, count: int) -> None:
    """Report this many batches of the first epoch, with a loss of 1 per sample."""
    for _, batch in zip(range(count), run.session.stream.epoch(0), strict=False):
        logits = torch.zeros(len(batch.labels), 3)
        run.reporter.add(batch, StepOutput(batch.weight.sum(), logits, torch.ones(len(logits), dtype=torch.bool)))


def test_a_resumed_run_continues_with_the_sums_of_the_saved_one(split: Path, tmp_path: Path) -> None:
    with open_run(split, tmp_path, data={"max_bad_fraction": 0.1}) as run:
        add_batches(run, 3)
        state, about = run.reporter.state(), run.reporter.about()
        resumed = Reporter(run.session, run.progress)
        resumed.load_state(state, about)
        assert torch.equal(resumed.state()[:-1], state[:-1])
        assert state[2] == SAMPLES - 1, "one cannot be read"
        assert state[-1] == 1
        assert resumed.about() == about == {"unreadable": 0}
        run.reporter.report_steps(0, 0.1, allowed_bad=1)
        assert [(line["samples"], line["loss"]) for line in run.lines()] == [(SAMPLES - 1, 1.0)]
        assert not run.reporter.state()[:-1].any(), "a line resets the sums"


@pytest.mark.parametrize("sums", [None, torch.ones(3)])
def test_sums_that_are_missing_or_of_another_version_are_ignored(
    split: Path, tmp_path: Path, sums: torch.Tensor | None
) -> None:
    with open_run(split, tmp_path) as run:
        run.reporter.load_state(sums, {"unreadable": 4})
        assert not run.reporter.state().any()
        assert run.reporter.about() == {"unreadable": 4}


def test_more_unreadable_samples_than_allowed_end_the_run(split: Path, tmp_path: Path) -> None:
    with open_run(split, tmp_path, data={"max_bad_fraction": 0.1}) as run:
        add_batches(run, 3)
        run.progress.step = 1  # within the epoch
        run.reporter.report_steps(0, 0.1, allowed_bad=1)
        with pytest.raises(CollectiveError, match=r"1 samples could not be read in epoch 0, .* allows 0"):
            run.reporter.report_steps(0, 0.1, allowed_bad=0)
