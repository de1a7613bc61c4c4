"""A run whose ranks were all killed, and that went on, is the run that was never killed.

On as many ranks it is the same bit for bit: every line of metrics.jsonl but for costs, weights, optimizer, statistics,
noise table, suspects. On other ranks, or with another engine, the samples of every step are the same, the noise table
is taken over exactly, and losses differ by rounding.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sopdist.checkpoint import open_checkpoint, verify_checkpoint
from sopdist.checkpoint.folder import name_of
from sopdist.noise.rows import NoiseTable
from tests.e2e.exactness import (
    BROKEN,
    EPOCH,
    SAMPLES,
    SAVED,
    STEPS,
    assert_same_checkpoint,
    assert_same_run,
    assert_worth_comparing,
    kill_after,
    train,
    visited_in,
    write_place,
)
from tests.e2e.records import losses_of, newest_checkpoint

ZERO = "engine.kind=deepspeed engine.zero="
ADAMW = "optim.name=adamw optim.lr=0.002"
PLUS = "objective.consistency=0.9 objective.balance=0.1"
STRADDLING = "log.every=5"  # a line about steps 16 to 20: the checkpoint of step 17 comes in between
IN_ORDER = "model.name=small_conv checkpoint.steps=1 checkpoint.keep=99"  # without batch statistics, every step saved

QUICK = {
    "one rank, decoded on the CPU": ("python", 1, f"data.backend=cpu {STRADDLING}"),
    "one rank, decoded by DALI": ("python", 1, "data.backend=dali"),
    "2 ranks of DDP": ("torchrun", 2, STRADDLING),
}
MATRIX = {
    "one rank, two pieces, AdamW, slots, not in the background": (
        "python", 1, f"train.accumulate=2 {ADAMW} objective.layout=slots checkpoint.async=false {STRADDLING}",
    ),
    "one rank of timm's with dropout": (
        "python", 1, "model.name=timm:resnet10t model.drop_rate=0.5 train.max_steps=22 train.batch=48",
    ),
    "2 ranks of DDP, SOP+, DALI, slots, clipped": (
        "torchrun", 2, f"{PLUS} data.backend=dali objective.layout=slots train.clip=1",
    ),
    "2 ranks, ZeRO 1, CPU": ("deepspeed", 2, f"{ZERO}1 data.backend=cpu"),
    "2 ranks, ZeRO 2, two pieces, AdamW, DALI": (
        "torchrun", 2, f"{ZERO}2 train.accumulate=2 {ADAMW} data.backend=dali {STRADDLING}",
    ),
    "2 ranks, ZeRO 3": ("deepspeed", 2, f"{ZERO}3 {STRADDLING}"),
}  # fmt: skip

Whole = Callable[[str, int, str], Path]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_place(tmp_path_factory.mktemp("exact"))


@pytest.fixture(scope="module")
def whole(place: Path) -> Whole:
    """The run that is never killed, each kind once."""
    numbers = iter(range(99))

    @cache
    def start(launcher: str, ranks: int, keys: str) -> Path:
        name = f"whole-{next(numbers)}"
        train(place, launcher, ranks, [f"run.name={name}", *keys.split()])
        return place / "runs" / name

    return start


def killed_and_resumed(place: Path, case: tuple[str, int, str], name: str) -> Path:
    """Killed after the step that is saved, and trained to the end."""
    launcher, ranks, keys = case
    given = [f"run.name={name}", *keys.split()]
    assert kill_after(place, launcher, ranks, given) == SAVED
    ended = train(place, launcher, ranks, [*given, "--resume", "auto"])
    assert f"goes on from runs/{name}/checkpoints/{name_of(SAVED)}, at step {SAVED}" in ended.err
    return place / "runs" / name


@pytest.mark.parametrize("case", QUICK)
def test_killed_and_resumed_is_never_killed(place: Path, whole: Whole, case: str) -> None:
    folder = killed_and_resumed(place, QUICK[case], case.replace(" ", "-"))
    assert_worth_comparing(whole(*QUICK[case]))
    assert_same_run(folder, whole(*QUICK[case]))


@pytest.mark.long
@pytest.mark.parametrize("case", MATRIX)
def test_killed_and_resumed_is_never_killed_with_any_engine(place: Path, whole: Whole, case: str) -> None:
    folder = killed_and_resumed(place, MATRIX[case], case.replace(" ", "-"))
    assert_worth_comparing(whole(*MATRIX[case]))
    assert_same_run(folder, whole(*MATRIX[case]))


@pytest.mark.long
@pytest.mark.parametrize(("before", "after"), [(1, (2,)), (2, (1, 3))], ids=["1 to 2", "2 to 1 and 3"])
def test_on_other_ranks_the_samples_are_the_same_the_table_is_exact_and_losses_are_close(
    place: Path, whole: Whole, before: int, after: tuple[int, ...]
) -> None:
    """A run is killed on some ranks, and goes on, each time from the same state, on others."""
    straight = whole("python", 1, IN_ORDER)
    keys = IN_ORDER.split()
    killed = place / "runs" / f"of-{before}"
    step = kill_after(place, launcher_of(before), before, [f"run.name={killed.name}", *keys])
    for ranks in after:
        folder = killed.with_name(f"from-{before}-to-{ranks}")
        shutil.copytree(killed, folder)
        ended = train(place, launcher_of(ranks), ranks, [f"run.name={folder.name}", *keys, "--resume", "auto"])
        assert f"{name_of(step)}, at step {step}" in ended.err
        assert losses_of(folder) == pytest.approx(losses_of(straight), rel=1e-3)
        assert order_of(folder) == order_of(straight)
        assert_taken_over(saved_in(folder, step), saved_in(folder, step + 1), ranks)
    epochs = [order_of(straight)[first : first + EPOCH] for first in range(0, STEPS - EPOCH, EPOCH)]
    everyone = sorted(set(range(SAMPLES)) - {BROKEN})
    assert all(sorted(index for step in epoch for index in step) == everyone for epoch in epochs)
    assert epochs[0] != epochs[1]


def launcher_of(ranks: int) -> str:
    return "python" if ranks == 1 else "torchrun"


def saved_in(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / name_of(step)


def order_of(folder: Path) -> list[list[int]]:
    """The samples of each step, as the noise table has counted them."""
    saved = [None, *(saved_in(folder, step) for step in range(1, STEPS + 1))]
    return [visited_in(before, after) for before, after in pairwise(saved) if after is not None]


def assert_taken_over(before: Path, after: Path, ranks: int) -> None:
    """The table that so many ranks load is the one that was saved, and what they save a step later differs from it in
    the rows of that step only. The rows that were saved are put together here by hand."""
    saved = open_checkpoint(before)
    assert open_checkpoint(after).ranks == ranks
    whole = rows_in(before)
    _, samples, classes, seed, *_ = saved.read("noise/0/meta").tolist()
    for rank in range(ranks):
        table = NoiseTable(samples, classes, layout="dense", seed=seed, first=rank, stride=ranks)
        table.load_state_dict(saved.noise(rank, ranks))
        for name, column in whole.items():
            assert torch.equal(getattr(table, name), column[rank::ranks]), name
    others = torch.ones(samples, dtype=torch.bool)
    others[visited_in(before, after)] = False
    for name, column in rows_in(after).items():
        assert torch.equal(column[others], whole[name][others]), name
        assert not torch.equal(column, whole[name]), name


def rows_in(checkpoint: Path) -> dict[str, Tensor]:
    """All rows of a dense table, by column: rank r of W has saved rows r, r + W, r + 2 W, ..."""
    saved = open_checkpoint(checkpoint)
    whole = {}
    for name in ("u", "v", "visits", "mean_loss", "mean_margin"):
        parts = [saved.read(f"noise/{rank}/{name}") for rank in range(saved.ranks)]
        whole[name] = torch.empty((SAMPLES, *parts[0].shape[1:]), dtype=parts[0].dtype)
        for rank, part in enumerate(parts):
            whole[name][rank :: saved.ranks] = part
    return whole


@pytest.mark.long
def test_a_run_wanders_from_ddp_over_zero_2_and_zero_3_and_back(place: Path, whole: Whole) -> None:
    """Killed each time, with batch statistics and momentum: close to the run that was DDP all the time."""
    keys = "checkpoint.steps=10 optim.momentum=0.9"
    straight = whole("torchrun", 2, keys)
    given = ["run.name=wanders", *keys.split()]
    for saved, engine in ((10, ""), (20, f"{ZERO}2"), (30, f"{ZERO}3")):
        resume = ["--resume", "auto"] if saved > 10 else []
        assert kill_after(place, "torchrun", 2, [*given, *engine.split(), *resume], saved=saved) == saved
        found = verify_checkpoint(saved_in(place / "runs" / "wanders", saved))
        assert found.engine == (f"deepspeed, ZeRO {engine[-1]}" if engine else "ddp")
    assert_same_checkpoint(*(saved_in(place / "runs" / name, 10) for name in ("wanders", straight.name)))
    train(place, "torchrun", 2, [*given, "--resume", "auto"])
    folder = place / "runs" / "wanders"
    assert losses_of(folder) == pytest.approx(losses_of(straight), rel=1e-3)
    found, wanted = (open_checkpoint(newest_checkpoint(run)) for run in (folder, straight))
    assert found.tensors.keys() == wanted.tensors.keys()
    for name in wanted.tensors:
        told = f"{name}: {{}}".format
        torch.testing.assert_close(found.read(name), wanted.read(name), rtol=1e-2, atol=1e-3, msg=told)
