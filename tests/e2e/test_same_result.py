"""The same seed and the same global batch give the same training on any number of ranks, with every engine.

Every run is compared with a plain loop in this process: the loss of each of 50 steps, which span three epochs, and the
final noise table and weights. No number of ranks divides the batch size, and the network has no batch statistics.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.support.grey_images import write_images
from tests.support.launchers import run
from tests.support.plain_loop import STEPS, Trained, overrides, train_plain_loop
from tests.support.records import MEANS, lines_of, losses_of, newest_checkpoint, table_in
from tests.support.without_launcher import run_without_launcher

PLUS = {"consistency": 0.9, "balance": 0.1}
Train = Callable[..., Path]
PlainLoop = Callable[..., Trained]

ZERO = "engine.kind=deepspeed engine.zero="
SLOTS, ACCUMULATE = "method.layout=slots", "train.accumulate=3"
MATRIX = {  # number of ranks and overrides of each case
    "one rank in three micro-batches": (1, ACCUMULATE),
    "one rank, ZeRO 1": (1, f"{ZERO}1"),
    "2 ranks, ZeRO 0, slots": (2, f"{ZERO}0 {SLOTS}"),
    "2 ranks, ZeRO 2 in three micro-batches": (2, f"{ZERO}2 {ACCUMULATE}"),
    "2 ranks, ZeRO 3 in three micro-batches": (2, f"{ZERO}3 {ACCUMULATE}"),
    "3 ranks, slots": (3, SLOTS),
    "3 ranks, ZeRO 0 in three micro-batches": (3, f"{ZERO}0 {ACCUMULATE}"),
    "3 ranks, ZeRO 1, slots": (3, f"{ZERO}1 {SLOTS}"),
    "3 ranks, ZeRO 2": (3, f"{ZERO}2"),
    "4 ranks in three micro-batches": (4, ACCUMULATE),
    "4 ranks, ZeRO 0": (4, f"{ZERO}0"),
    "4 ranks, ZeRO 1 in three micro-batches": (4, f"{ZERO}1 {ACCUMULATE}"),
    "4 ranks, ZeRO 2, slots": (4, f"{ZERO}2 {SLOTS}"),
}
WITH_PLUS = " ".join(f"method.{name}={value}" for name, value in PLUS.items())
MATRIX_PLUS = {
    "2 ranks, SOP+": (2, f"{WITH_PLUS} {SLOTS}"),
    "3 ranks, SOP+, ZeRO 1": (3, f"{WITH_PLUS} {ZERO}1"),
}


@pytest.fixture(scope="module")
def plain_loop(digits: Path) -> PlainLoop:
    """Train with the plain loop. Each case is trained once."""
    return cache(lambda **plus: train_plain_loop(digits, **plus))


@pytest.fixture
def train(digits: Path, tmp_path: Path) -> Train:
    """Train with the trainer and return the run folder."""

    def start(launcher: str, ranks: int, *more: str) -> Path:
        ended = run(launcher, ["--cfg", "demo", "run.name=run", *overrides(digits), *more], tmp_path, ranks)
        assert ended.code == 0, ended.output
        return tmp_path / "runs" / "run"

    return start


@pytest.fixture(scope="module")
def trained(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The run folder of a case. The same processes train all cases with the same number of ranks."""
    cases = MATRIX | MATRIX_PLUS

    @cache
    def train_all(ranks: int) -> Path:
        folder = tmp_path_factory.mktemp(f"ranks-{ranks}")
        mine = [case for case in cases if cases[case][0] == ranks]
        lines = [
            ["--cfg", "demo", f"run.name={case}", *overrides(digits), "engine.kind=auto", *cases[case][1].split()]
            for case in mine
        ]
        for case, ended in zip(mine, run_without_launcher(folder, lines, ranks, timeout=400), strict=True):
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
        torch.testing.assert_close(found[name], plain.table[name], rtol=1e-4, atol=atol, msg=labelled(name))
    weights = load_file(folder / "network-last.safetensors")
    for name, value in plain.weights.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-3, atol=2e-5, msg=labelled(name))


def labelled(name: str) -> Callable[[str], str]:
    return lambda text: f"{name}: {text}"


def visits_of(samples: list[list[int]], count: int) -> Tensor:
    return torch.bincount(torch.tensor([index for step in samples for index in step]), minlength=count)


def test_the_plain_loop_is_a_useful_reference(plain_loop: PlainLoop) -> None:
    """The loss falls, the noise table changes, and training reaches the third epoch."""
    plain = plain_loop()
    assert plain.losses[-1] < 0.8 * plain.losses[0]
    assert plain.table["u"].abs().max() > 0.3
    assert 0.05 < (plain.table["u"].abs() > 0.1).float().mean() < 0.95
    assert plain.table["visits"].unique().tolist() == [2, 3]
    assert torch.equal(plain.table["visits"].long(), visits_of(plain.samples, len(plain.table["visits"])))
    assert plain_loop(seed=4).losses[0] != pytest.approx(plain.losses[0], rel=1e-3)


@pytest.mark.parametrize("plus", [{}, PLUS], ids=["sop", "sop+"])
def test_the_plain_loop_does_not_amplify_the_last_bit(
    digits: Path, plain_loop: PlainLoop, plus: dict[str, float]
) -> None:
    """Otherwise a difference between two runs would not mean anything."""
    plain = plain_loop(**plus)
    for nudge in range(2):
        other = train_plain_loop(digits, nudge=nudge, **plus)
        assert other.losses == pytest.approx(plain.losses, rel=1e-6)
        torch.testing.assert_close(other.table["u"], plain.table["u"], rtol=1e-6, atol=1e-8)


def test_one_rank_trains_like_the_plain_loop(train: Train, plain_loop: PlainLoop) -> None:
    assert_same(train("python", 1), plain_loop())


def test_two_ranks_of_ddp_train_like_the_plain_loop(train: Train, plain_loop: PlainLoop) -> None:
    folder = train("torchrun", 2)
    assert_same(folder, plain_loop())
    assert len(list(newest_checkpoint(folder).glob("rank-*-of-2.safetensors"))) == 2
    assert sum(line["exchange_bytes_per_sample"] for line in lines_of(folder)) > 0


def test_two_ranks_of_deepspeed_zero_1_train_like_the_plain_loop(train: Train, plain_loop: PlainLoop) -> None:
    assert_same(train("deepspeed", 2, "engine.kind=deepspeed", "engine.zero=1"), plain_loop())


@pytest.mark.long
@pytest.mark.parametrize("case", MATRIX)
def test_any_ranks_engine_layout_and_accumulation_train_like_the_plain_loop(
    trained: Callable[[str], Path], plain_loop: PlainLoop, case: str
) -> None:
    assert_same(trained(case), plain_loop())


@pytest.mark.long
def test_updates_of_the_last_step_of_an_epoch_are_used_in_the_first_step_of_the_next(tmp_path: Path) -> None:
    """A batch has nearly half of all samples, so some are in both steps, and rows are sent one step ahead."""
    write_images(tmp_path / "shards" / "train", 61)
    (tmp_path / "small.yaml").write_text(
        "data: {root: shards, split: train, recipe: digits, labels: wrong}\n"
        "model: {name: small_conv}\n"
        "method: {visits: 2, onset: always}\n"
        "optim: {lr: 0.01}\n"
        "train: {epochs: 8, batch: 29}\n"
        "engine: {threads: 1}\n"
        "evaluate: {every: 99}\n"  # evaluation and checkpoints would wait for pending updates
        "checkpoint: {every: 99}\n"
        "log: {every: 1, wandb: 'off'}\n"
    )
    for launcher, ranks in (("python", 1), ("torchrun", 2)):
        ended = run(launcher, ["--cfg", "small.yaml", f"run.name=of{ranks}"], tmp_path, ranks)
        assert ended.code == 0, ended.output
    one, two = (tmp_path / "runs" / name for name in ("of1", "of2"))
    assert losses_of(two) == pytest.approx(losses_of(one), rel=1e-5)
    assert table_in(newest_checkpoint(one))["u"].abs().max() > 0.5


@pytest.mark.long
@pytest.mark.parametrize("case", MATRIX_PLUS)
def test_sop_plus_on_any_number_of_ranks_trains_like_the_plain_loop(
    trained: Callable[[str], Path], plain_loop: PlainLoop, case: str
) -> None:
    assert_same(trained(case), plain_loop(**PLUS))
