"""What SOP+ adds: mixed pairs of samples. Also the batch of all ranks, from which partners are drawn."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from sopdist import SOP
from sopdist.errors import ConfigError
from sopdist.methods.global_batch import GlobalBatch
from sopdist.methods.method import Setup
from sopdist.methods.mixup import Pairs, draw_pairs, mix, mixed_losses
from sopdist.methods.sop import SOPSettings
from sopdist.noise.rows import corrected_labels
from sopdist.train import config as configs
from sopdist.train.run import run_config
from tests.support.grey_images import write_images
from tests.support.ranks import run_on_ranks


def open_batch(
    count: int, seed: int = 3, step: int = 11, group: dist.ProcessGroup | None = None, samples: int = 300_000
) -> GlobalBatch:
    """A step with `count` samples over all ranks."""
    cpu = torch.device("cpu")
    batch = GlobalBatch(Setup(samples, 4, 1, count, np.zeros(samples, np.int64), seed, cpu, group))
    batch.counters.fill_(step)
    batch.announce(np.arange(count))
    return batch


# -- pairs -------------------------------------------------------------------------------------------------------------


def pairs_and_values_of_all_ranks(group: dist.ProcessGroup) -> None:
    """What each rank draws and gathers, against one rank."""
    for count in (7, 3):
        batch, whole = open_batch(count, group=group), open_batch(count)
        assert (batch.total, whole.mine) == (count, slice(0, count))
        for options in ({}, {"one_share": True}, {"at_least_half": False}):
            pairs, expected = (draw_pairs(each, 4.0, **options) for each in (batch, whole))
            assert torch.equal(pairs.partner, expected.partner[batch.mine])
            assert torch.equal(pairs.share, expected.share[batch.mine])
        for values in (torch.arange(2.0 * count).view(count, 2), torch.arange(count)):
            assert torch.equal(batch.gather(values[batch.mine]), values)
            assert torch.equal(batch.sum(values[batch.mine].sum(0)), values.sum(0))


def a_loss_of_a_sum(group: dist.ProcessGroup) -> None:
    """Shares add up to the loss, and their gradients to its gradient, which autograd finds for the whole batch."""
    ranks, values = dist.get_world_size(group), torch.linspace(0.1, 2.1, 21).view(7, 3)
    batch = open_batch(7, group=group)
    mine = values[batch.mine].clone().requires_grad_()
    share = batch.loss_of_sum((mine**2).sum(0), lambda total: (total.log() * total[0]).sum())
    share.backward()
    everything = values.clone().requires_grad_()
    total = (everything**2).sum(0)
    expected = (total.log() * total[0]).sum()
    expected.backward()
    assert mine.grad is not None
    assert everything.grad is not None
    torch.testing.assert_close(mine.grad, everything.grad[batch.mine])
    torch.testing.assert_close(share.detach() * ranks, expected.detach())


def batches_in_turn(group: dist.ProcessGroup) -> None:
    """Batches are announced one step ahead, and may have different sizes."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    batch = open_batch(8, group=group, step=0)
    batch.announce(np.array([5, -1, 6, -1, 7]))
    assert sum(batch.sizes) == 8
    batch.finish()
    assert (batch.step, batch.step_of_epoch, batch.total) == (1, 1, 5)
    assert batch.mine == slice(rank * 5 // ranks, (rank + 1) * 5 // ranks)
    batch.begin_epoch()
    assert (batch.step, batch.step_of_epoch) == (1, 0)


def test_pairs_sums_and_losses_on_three_ranks_are_those_on_one(tmp_path: Path) -> None:
    run_on_ranks([pairs_and_values_of_all_ranks, a_loss_of_a_sum, batches_in_turn], 3, tmp_path)


def test_one_rank_computes_the_loss_of_a_sum_itself() -> None:
    values = torch.linspace(0.1, 2.1, 21).view(7, 3).requires_grad_()
    batch = open_batch(7)
    loss = batch.loss_of_sum(values.sum(0), lambda total: total.prod())
    (found,) = torch.autograd.grad(loss, values)
    (expected,) = torch.autograd.grad(values.sum(0).prod(), values)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(loss, values.sum(0).prod())


def test_pairs_depend_on_seed_and_step() -> None:
    pairs = draw_pairs(open_batch(7), 4.0)
    assert sorted(pairs.partner.tolist()) == list(range(7)), "each sample is a partner once"
    assert torch.equal(draw_pairs(open_batch(7), 4.0).share, pairs.share)
    assert not torch.equal(draw_pairs(open_batch(7, step=12), 4.0).share, pairs.share)
    assert not torch.equal(draw_pairs(open_batch(7, seed=4), 4.0).share, pairs.share)


def test_shares_follow_the_beta_distribution_from_one_half_up() -> None:
    share = draw_pairs(open_batch(200_000), 4.0).share.double()
    assert 0.5 <= float(share.min()) <= float(share.max()) <= 1
    expected = np.random.default_rng(0).beta(4, 4, 200_000)
    assert float(share.mean()) == pytest.approx(float(np.maximum(expected, 1 - expected).mean()), abs=2e-3)
    symmetric = draw_pairs(open_batch(200_000), 4.0, at_least_half=False).share.double()
    assert float(symmetric.mean()) == pytest.approx(0.5, abs=2e-3)
    assert float(symmetric.std()) == pytest.approx(1 / 6, abs=2e-3), "of Beta(4, 4)"


def test_images_and_losses_are_mixed_by_the_shares() -> None:
    """One sample at a time, in float64."""
    draws = torch.Generator().manual_seed(0)
    images, logits = torch.randn(5, 2, 3, 3, generator=draws), torch.randn(5, 4, generator=draws)
    targets, pairs = torch.tensor([0, 3, 1, 1, 2]), Pairs(torch.tensor([3, 1, 4, 0, 2]), torch.rand(5, generator=draws))
    mixed, losses = mix(images, pairs, images), mixed_losses(logits, targets, pairs, targets)
    for row, (partner, share) in enumerate(zip(pairs.partner.tolist(), pairs.share.double().tolist(), strict=True)):
        expected = share * images[row].double() + (1 - share) * images[partner].double()
        torch.testing.assert_close(mixed[row].double(), expected, rtol=1e-6, atol=1e-6)
        log_p = logits[row].double().log_softmax(0)
        wanted = -share * log_p[targets[row]] - (1 - share) * log_p[targets[partner]]
        assert float(losses[row]) == pytest.approx(float(wanted), rel=1e-5)


@pytest.mark.parametrize("layout", ["dense", "slots"])
def test_flagged_labels_are_mixed_as_the_table_corrects_them(layout: str) -> None:
    labels = torch.arange(8) % 4
    z = torch.zeros(8, 4).scatter(1, ((labels + (torch.arange(8) < 3)) % 4)[:, None], 5.0)
    sop = SOP(8, 4, onset="always", layout=layout)
    for _ in range(8):
        sop(z.clone().requires_grad_(), labels, torch.arange(8))
    rows = torch.tensor([7, 0, 2, 4])
    expected = torch.where(rows < 3, (labels[rows] + 1) % 4, labels[rows])
    assert torch.equal(corrected_labels(sop.table.block, rows, labels[rows]), expected)
    sop.keep_corrected = True
    sop(z[rows].requires_grad_(), labels[rows], rows)
    assert sop.corrected is not None
    assert torch.equal(sop.corrected, expected)


# -- settings and runs -------------------------------------------------------------------------------------------------

CONFIG = """
data: {root: shards, split: train, recipe: digits, labels: wrong, backend: cpu, threads: 1}
model: {name: small_conv}
method: {onset: 1, mixup: 1.0}
optim: {lr: 0.05}
train: {epochs: 3, batch: 9}
engine: {threads: 1}
evaluate: {splits: {val: val}}
log: {every: 1, wandb: 'off'}
"""


@pytest.mark.parametrize(("key", "value"), [("mixup", -1.0), ("mixup", float("inf")), ("mixup_alpha", 0.0)])
def test_bad_settings_are_refused_by_name(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"method\.{key} = "):
        SOPSettings(**{key: value})


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_images(tmp_path / "shards" / "train", 61)
    write_images(tmp_path / "shards" / "val", 30)
    (tmp_path / "plus.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("workspace")
def test_what_cannot_work_together_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"method\.mixup = 1\.0: needs the full batch"):
        configs.load("plus.yaml", ["train.accumulate=2"])


@pytest.mark.usefixtures("workspace")
def test_mixup_starts_at_the_onset() -> None:
    def losses(name: str, *overrides: str) -> list[float]:
        assert run_config("plus.yaml", [f"run.name={name}", *overrides]) == 0
        lines = map(json.loads, Path(f"runs/{name}/metrics.jsonl").read_text().splitlines())
        return [line["loss"] for line in lines if line["kind"] == "train"]

    with_mixup, without = losses("with"), losses("without", "method.mixup=0")
    assert with_mixup[:7] == without[:7], "one epoch has 7 steps"
    assert with_mixup[7] > without[7]
