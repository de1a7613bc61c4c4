"""A run that was killed and resumed has the result of a run that was never killed.

On the same number of ranks the result is bit-identical: every line of metrics.jsonl except times and costs, weights,
optimizer, statistics, noise table, suspects. On another number of ranks, or with another engine, the samples of every
step are the same, the noise table is loaded exactly, and losses differ only by rounding.
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
from tests.support.exactness import (
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
    write_workspace,
)
from tests.support.records import losses_of, newest_checkpoint

ZERO = "engine.kind=deepspeed engine.zero="
ADAMW = "optim.name=adamw optim.lr=0.002"
PLUS = "method.consistency=0.9 method.balance=0.1"
STRADDLING = "log.every=5"  # one line for steps 16 to 20, with the checkpoint of step 17 in between
EVERY_STEP = "model.name=small_conv checkpoint.steps=1 checkpoint.keep=99"  # without batch statistics, all steps saved

QUICK = {
    "one rank, decoded on the CPU": ("python", 1, f"data.backend=cpu {STRADDLING}"),
    "one rank, decoded by DALI": ("python", 1, "data.backend=dali"),
    "2 ranks of DDP": ("torchrun", 2, STRADDLING),
}
MATRIX = {
    "one rank, two micro-batches, AdamW, slots, synchronous saves": (
        "python", 1, f"train.accumulate=2 {ADAMW} method.layout=slots checkpoint.async=false {STRADDLING}",
    ),
    "one rank, timm, dropout": (
        "python", 1, "model.name=timm:resnet10t model.drop_rate=0.5 train.max_steps=22 train.batch=48",
    ),
    "2 ranks of DDP, SOP+, DALI, slots, gradient clipping": (
        "torchrun", 2, f"{PLUS} data.backend=dali method.layout=slots train.clip=1",
    ),
    "2 ranks, ZeRO 1, CPU": ("deepspeed", 2, f"{ZERO}1 data.backend=cpu"),
    "2 ranks, ZeRO 2, two micro-batches, AdamW, DALI": (
        "torchrun", 2, f"{ZERO}2 train.accumulate=2 {ADAMW} data.backend=dali {STRADDLING}",
    ),
    "2 ranks, ZeRO 3": ("deepspeed", 2, f"{ZERO}3 {STRADDLING}"),
}  # fmt: skip

Uninterrupted = Callable[[str, int, str], Path]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_workspace(tmp_path_factory.mktemp("exact"))


@pytest.fixture(scope="module")
def uninterrupted(workspace: Path) -> Uninterrupted:
    """Train a run that is never killed. Each case is trained once."""
    numbers = iter(range(99))

    @cache
    def start(launcher: str, ranks: int, keys: str) -> Path:
        name = f"uninterrupted-{next(numbers)}"
        train(workspace, launcher, ranks, [f"run.name={name}", *keys.split()])
        return workspace / "runs" / name

    return start


def killed_and_resumed(workspace: Path, case: tuple[str, int, str], name: str) -> Path:
    """Kill a run after the step with a checkpoint, and resume it until it ends."""
    launcher, ranks, keys = case
    given = [f"run.name={name}", *keys.split()]
    assert kill_after(workspace, launcher, ranks, given) == SAVED
    ended = train(workspace, launcher, ranks, [*given, "--resume", "auto"])
    assert f"resuming from runs/{name}/checkpoints/{name_of(SAVED)} at step {SAVED}" in ended.err
    return workspace / "runs" / name


@pytest.mark.parametrize("case", QUICK)
def test_a_killed_and_resumed_run_equals_an_uninterrupted_one(
    workspace: Path, uninterrupted: Uninterrupted, case: str
) -> None:
    folder = killed_and_resumed(workspace, QUICK[case], case.replace(" ", "-"))
    assert_worth_comparing(uninterrupted(*QUICK[case]))
    assert_same_run(folder, uninterrupted(*QUICK[case]))


@pytest.mark.long
@pytest.mark.parametrize("case", MATRIX)
def test_a_killed_and_resumed_run_equals_an_uninterrupted_one_with_any_engine(
    workspace: Path, uninterrupted: Uninterrupted, case: str
) -> None:
    folder = killed_and_resumed(workspace, MATRIX[case], case.replace(" ", "-"))
    assert_worth_comparing(uninterrupted(*MATRIX[case]))
    assert_same_run(folder, uninterrupted(*MATRIX[case]))


@pytest.mark.long
@pytest.mark.parametrize(("before", "after"), [(1, (2,)), (2, (1, 3))], ids=["1 to 2", "2 to 1 and 3"])
def test_on_another_number_of_ranks_samples_are_the_same_the_table_is_exact_and_losses_are_close(
    workspace: Path, uninterrupted: Uninterrupted, before: int, after: tuple[int, ...]
) -> None:
    """A run is killed, and resumed from the same state on several other numbers of ranks."""
    straight = uninterrupted("python", 1, EVERY_STEP)
    keys = EVERY_STEP.split()
    killed = workspace / "runs" / f"of-{before}"
    step = kill_after(workspace, launcher_of(before), before, [f"run.name={killed.name}", *keys])
    for ranks in after:
        folder = killed.with_name(f"from-{before}-to-{ranks}")
        shutil.copytree(killed, folder)
        ended = train(workspace, launcher_of(ranks), ranks, [f"run.name={folder.name}", *keys, "--resume", "auto"])
        assert f"{name_of(step)} at step {step}" in ended.err
        assert losses_of(folder) == pytest.approx(losses_of(straight), rel=1e-3)
        assert order_of(folder) == order_of(straight)
        assert_loaded_exactly(saved_in(folder, step), saved_in(folder, step + 1), ranks)
    epochs = [order_of(straight)[first : first + EPOCH] for first in range(0, STEPS - EPOCH, EPOCH)]
    all_readable = sorted(set(range(SAMPLES)) - {BROKEN})
    assert all(sorted(index for step in epoch for index in step) == all_readable for epoch in epochs)
    assert epochs[0] != epochs[1]


def launcher_of(ranks: int) -> str:
    return "python" if ranks == 1 else "torchrun"


def saved_in(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / name_of(step)


def order_of(folder: Path) -> list[list[int]]:
    """The samples of each step, as counted by the noise table."""
    saved = [None, *(saved_in(folder, step) for step in range(1, STEPS + 1))]
    return [visited_in(before, after) for before, after in pairwise(saved) if after is not None]


def assert_loaded_exactly(before: Path, after: Path, ranks: int) -> None:
    """The table that these ranks load is the saved one, and what they save a step later differs from it only in the
    rows of that step. `rows_in` is independent of the code that reshards tables."""
    saved = open_checkpoint(before)
    assert open_checkpoint(after).ranks == ranks
    full = rows_in(before)
    _, samples, classes, seed, *_ = saved.read("tables/noise/0/meta").tolist()
    for rank in range(ranks):
        table = NoiseTable(samples, classes, layout="dense", seed=seed, first=rank, stride=ranks)
        table.load_state_dict(saved.table("noise", rank, ranks))
        for name, column in full.items():
            assert torch.equal(getattr(table, name), column[rank::ranks]), name
    others = torch.ones(samples, dtype=torch.bool)
    others[visited_in(before, after)] = False
    for name, column in rows_in(after).items():
        assert torch.equal(column[others], full[name][others]), name
        assert not torch.equal(column, full[name]), name


def rows_in(checkpoint: Path) -> dict[str, Tensor]:
    """All rows of a dense table, by column: rank r of W saves rows r, r + W, r + 2 W, ..."""
    saved = open_checkpoint(checkpoint)
    full = {}
    for name in ("u", "v", "visits", "mean_loss", "mean_margin"):
        parts = [saved.read(f"tables/noise/{rank}/{name}") for rank in range(saved.ranks)]
        full[name] = torch.empty((SAMPLES, *parts[0].shape[1:]), dtype=parts[0].dtype)
        for rank, part in enumerate(parts):
            full[name][rank :: saved.ranks] = part
    return full


@pytest.mark.long
def test_a_run_switches_from_ddp_to_zero_2_to_zero_3_and_back(workspace: Path, uninterrupted: Uninterrupted) -> None:
    """Killed each time, with batch statistics and momentum: the result is close to that of DDP alone."""
    keys = "checkpoint.steps=10 optim.momentum=0.9"
    straight = uninterrupted("torchrun", 2, keys)
    given = ["run.name=switches", *keys.split()]
    for saved, engine in ((10, ""), (20, f"{ZERO}2"), (30, f"{ZERO}3")):
        resume = ["--resume", "auto"] if saved > 10 else []
        assert kill_after(workspace, "torchrun", 2, [*given, *engine.split(), *resume], saved=saved) == saved
        found = verify_checkpoint(saved_in(workspace / "runs" / "switches", saved))
        assert found.engine == (f"deepspeed, ZeRO {engine[-1]}" if engine else "ddp")
    assert_same_checkpoint(*(saved_in(workspace / "runs" / name, 10) for name in ("switches", straight.name)))
    train(workspace, "torchrun", 2, [*given, "--resume", "auto"])
    folder = workspace / "runs" / "switches"
    assert losses_of(folder) == pytest.approx(losses_of(straight), rel=1e-3)
    found, wanted = (open_checkpoint(newest_checkpoint(run)) for run in (folder, straight))
    assert found.tensors.keys() == wanted.tensors.keys()
    for name in wanted.tensors:
        message = f"{name}: {{}}".format
        torch.testing.assert_close(found.read(name), wanted.read(name), rtol=1e-2, atol=1e-3, msg=message)
