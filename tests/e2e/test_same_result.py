"""The same seed and the same global batch give the same training on any number of ranks, with every engine.

Every run is compared with a plain loop in this process: the loss of each of 50 steps, which cross two ends of an epoch,
the noise table and the weights at the end. The batch divides by no number of ranks, and the network has no batch
statistics.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.e2e.by_hand import by_hand
from tests.e2e.launchers import run
from tests.e2e.plain_loop import STEPS, Trained, overrides, train_plainly
from tests.e2e.records import MEANS, lines_of, losses_of, newest_checkpoint, table_in
from tests.train.grey_images import write_images

PLUS = {"consistency": 0.9, "balance": 0.1}
Train = Callable[..., Path]
Plainly = Callable[..., Trained]

ZERO = "engine.kind=deepspeed engine.zero="
SLOTS, PIECES = "objective.layout=slots", "train.accumulate=3"
MATRIX = {  # ranks, and the settings of each case
    "one rank in three pieces": (1, PIECES),
    "one rank, ZeRO 1": (1, f"{ZERO}1"),
    "2 ranks, ZeRO 0, slots": (2, f"{ZERO}0 {SLOTS}"),
    "2 ranks, ZeRO 2 in three pieces": (2, f"{ZERO}2 {PIECES}"),
    "2 ranks, ZeRO 3 in three pieces": (2, f"{ZERO}3 {PIECES}"),
    "3 ranks, slots": (3, SLOTS),
    "3 ranks, ZeRO 0 in three pieces": (3, f"{ZERO}0 {PIECES}"),
    "3 ranks, ZeRO 1, slots": (3, f"{ZERO}1 {SLOTS}"),
    "3 ranks, ZeRO 2": (3, f"{ZERO}2"),
    "4 ranks in three pieces": (4, PIECES),
    "4 ranks, ZeRO 0": (4, f"{ZERO}0"),
    "4 ranks, ZeRO 1 in three pieces": (4, f"{ZERO}1 {PIECES}"),
    "4 ranks, ZeRO 2, slots": (4, f"{ZERO}2 {SLOTS}"),
}
WITH_PLUS = " ".join(f"objective.{name}={value}" for name, value in PLUS.items())
MATRIX_PLUS = {
    "2 ranks, SOP+": (2, f"{WITH_PLUS} {SLOTS}"),
    "3 ranks, SOP+, ZeRO 1": (3, f"{WITH_PLUS} {ZERO}1"),
}


@pytest.fixture(scope="module")
def plainly(digits: Path) -> Plainly:
    """Train by the plain loop, each kind once."""
    return cache(lambda **plus: train_plainly(digits, **plus))


@pytest.fixture
def train(digits: Path, tmp_path: Path) -> Train:
    """Train by the trainer; the run's folder."""

    def start(launcher: str, ranks: int, *more: str) -> Path:
        ended = run(launcher, ["--cfg", "demo", "run.name=run", *overrides(digits), *more], tmp_path, ranks)
        assert ended.code == 0, ended.told
        return tmp_path / "runs" / "run"

    return start


@pytest.fixture(scope="module")
def trained(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The run of a case. All cases with the same number of ranks are trained by the same processes."""
    cases = MATRIX | MATRIX_PLUS

    @cache
    def train_all(ranks: int) -> Path:
        folder = tmp_path_factory.mktemp(f"ranks-{ranks}")
        mine = [case for case in cases if cases[case][0] == ranks]
        lines = [
            ["--cfg", "demo", f"run.name={case}", *overrides(digits), "engine.kind=auto", *cases[case][1].split()]
            for case in mine
        ]
        for case, ended in zip(mine, by_hand(folder, lines, ranks, timeout=400), strict=True):
            assert [code for code, _ in ended] == [0] * ranks, (case, ended)
        return folder

    return lambda case: train_all(cases[case][0]) / "runs" / case


def assert_same(folder: Path, plain: Trained) -> None:
    losses = losses_of(folder)
    assert len(losses) == STEPS
    assert losses == pytest.approx(plain.losses, rel=1e-5)
    found = table_in(newest_checkpoint(folder))
    assert torch.equal(found["visits"], plain.table["visits"])
    for name, atol in {"u": 1e-6, "v": 1e-6, **dict.fromkeys(MEANS, 5e-5)}.items():
        torch.testing.assert_close(found[name], plain.table[name], rtol=1e-4, atol=atol, msg=told(name))
    weights = load_file(folder / "network-last.safetensors")
    for name, value in plain.weights.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-3, atol=2e-5, msg=told(name))


def told(name: str) -> Callable[[str], str]:
    return lambda text: f"{name}: {text}"


def visits_of(samples: list[list[int]], number: int) -> Tensor:
    return torch.bincount(torch.tensor([index for step in samples for index in step]), minlength=number)


def test_the_plain_loop_is_worth_comparing_with(plainly: Plainly) -> None:
    """The losses fall, the table is at work, and the steps reach into a third epoch."""
    plain = plainly()
    assert plain.losses[-1] < 0.8 * plain.losses[0]
    assert plain.table["u"].abs().max() > 0.3
    assert 0.05 < (plain.table["u"].abs() > 0.1).float().mean() < 0.95
    assert plain.table["visits"].unique().tolist() == [2, 3]
    assert torch.equal(plain.table["visits"].long(), visits_of(plain.samples, len(plain.table["visits"])))
    assert plainly(seed=4).losses[0] != pytest.approx(plain.losses[0], rel=1e-3)


@pytest.mark.parametrize("plus", [{}, PLUS], ids=["sop", "sop+"])
def test_the_plain_loop_does_not_make_much_of_the_last_bit(
    digits: Path, plainly: Plainly, plus: dict[str, float]
) -> None:
    """Otherwise a difference between two ways to train would say nothing."""
    plain = plainly(**plus)
    for nudge in range(2):
        other = train_plainly(digits, nudge=nudge, **plus)
        assert other.losses == pytest.approx(plain.losses, rel=1e-6)
        torch.testing.assert_close(other.table["u"], plain.table["u"], rtol=1e-6, atol=1e-8)


def test_one_rank_trains_as_the_plain_loop(train: Train, plainly: Plainly) -> None:
    assert_same(train("python", 1), plainly())


def test_two_ranks_of_ddp_train_as_the_plain_loop(train: Train, plainly: Plainly) -> None:
    folder = train("torchrun", 2)
    assert_same(folder, plainly())
    assert len(list(newest_checkpoint(folder).glob("rank-*-of-2.safetensors"))) == 2
    assert sum(line["exchange_bytes_a_sample"] for line in lines_of(folder)) > 0


def test_two_ranks_of_deepspeed_zero_1_train_as_the_plain_loop(train: Train, plainly: Plainly) -> None:
    assert_same(train("deepspeed", 2, "engine.kind=deepspeed", "engine.zero=1"), plainly())


@pytest.mark.long
@pytest.mark.parametrize("case", MATRIX)
def test_any_number_of_ranks_engine_layout_and_pieces_trains_as_the_plain_loop(
    trained: Callable[[str], Path], plainly: Plainly, case: str
) -> None:
    assert_same(trained(case), plainly())


@pytest.mark.long
def test_rows_of_the_last_step_of_an_epoch_are_up_to_date_in_the_first_step_of_the_next(tmp_path: Path) -> None:
    """A batch of nearly half of all samples: some are in both, and rows are sent a step ahead."""
    write_images(tmp_path / "shards" / "train", 61)
    (tmp_path / "small.yaml").write_text(
        "data: {root: shards, split: train, recipe: digits, labels: wrong}\n"
        "model: {name: small_conv}\n"
        "objective: {visits: 2}\n"
        "optim: {lr: 0.01}\n"
        "train: {epochs: 8, batch: 29}\n"
        "engine: {threads: 1}\n"
        "evaluate: {every: 99}\n"  # it would wait for facts under way, and so would a checkpoint
        "checkpoint: {every: 99}\n"
        "log: {every: 1, wandb: 'off'}\n"
    )
    for launcher, ranks in (("python", 1), ("torchrun", 2)):
        ended = run(launcher, ["--cfg", "small.yaml", f"run.name=of{ranks}"], tmp_path, ranks)
        assert ended.code == 0, ended.told
    one, two = (tmp_path / "runs" / name for name in ("of1", "of2"))
    assert losses_of(two) == pytest.approx(losses_of(one), rel=1e-5)
    assert table_in(newest_checkpoint(one))["u"].abs().max() > 0.5


@pytest.mark.long
@pytest.mark.parametrize("case", MATRIX_PLUS)
def test_sop_plus_on_any_number_of_ranks_trains_as_the_plain_loop(
    trained: Callable[[str], Path], plainly: Plainly, case: str
) -> None:
    assert_same(trained(case), plainly(**PLUS))
