"""What SOP+ adds: mixed pairs of samples, and an average of the weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from sopdist import SOP
from sopdist.checkpoint.tensor_file import read_tensors
from sopdist.cli import main
from sopdist.errors import ConfigError
from sopdist.methods.averaged import Averaged, average_weights
from sopdist.methods.mixup import draw_pairs, gather, mix, mixed_losses
from sopdist.methods.sop import SOPSettings
from sopdist.noise.rows import corrected_labels
from sopdist.train import config as configs
from sopdist.train.run import run_config
from tests.support.grey_images import write_images
from tests.support.ranks import run_on_ranks

CPU = torch.device("cpu")


# -- pairs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[7], [4, 3], [3, 2, 2], [7, 0]])
def test_pairs_depend_on_seed_and_step_but_not_on_the_ranks(sizes: list[int]) -> None:
    whole = draw_pairs(3, 11, [7], 0, 4.0, CPU)
    parts = [draw_pairs(3, 11, sizes, rank, 4.0, CPU) for rank in range(len(sizes))]
    assert torch.equal(torch.cat([part.partner for part in parts]), whole.partner)
    assert torch.equal(torch.cat([part.share for part in parts]), whole.share)
    assert sorted(whole.partner.tolist()) == list(range(7)), "each sample is a partner once"
    assert not torch.equal(draw_pairs(3, 12, [7], 0, 4.0, CPU).share, whole.share)
    assert not torch.equal(draw_pairs(4, 11, [7], 0, 4.0, CPU).share, whole.share)


def test_shares_follow_the_beta_distribution_from_one_half_up() -> None:
    share = draw_pairs(0, 0, [200_000], 0, 4.0, CPU).share.double()
    assert 0.5 <= float(share.min()) <= float(share.max()) <= 1
    expected = np.random.default_rng(0).beta(4, 4, 200_000)
    assert float(share.mean()) == pytest.approx(float(np.maximum(expected, 1 - expected).mean()), abs=2e-3)


def test_images_and_losses_are_mixed_by_the_shares() -> None:
    """One sample at a time, in float64."""
    draws = torch.Generator().manual_seed(0)
    images, logits = torch.randn(5, 2, 3, 3, generator=draws), torch.randn(5, 4, generator=draws)
    targets, pairs = torch.tensor([0, 3, 1, 1, 2]), draw_pairs(1, 2, [5], 0, 1.0, CPU)
    mixed, losses = mix(images, pairs, images), mixed_losses(logits, targets, pairs, targets)
    for row, (partner, share) in enumerate(zip(pairs.partner.tolist(), pairs.share.double().tolist(), strict=True)):
        expected = share * images[row].double() + (1 - share) * images[partner].double()
        torch.testing.assert_close(mixed[row].double(), expected, rtol=1e-6, atol=1e-6)
        log_p = logits[row].double().log_softmax(0)
        wanted = -share * log_p[targets[row]] - (1 - share) * log_p[targets[partner]]
        assert float(losses[row]) == pytest.approx(float(wanted), rel=1e-5)


def gathers_uneven_parts(group: dist.ProcessGroup) -> None:
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    values = torch.arange(14.0).view(7, 2)
    sizes = [len(part) for part in torch.arange(7).tensor_split(ranks)]
    mine = values.tensor_split(ranks)[rank]
    assert torch.equal(gather(mine, sizes, group), values)


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_values_of_all_ranks_are_gathered(ranks: int, tmp_path: Path) -> None:
    run_on_ranks([gathers_uneven_parts], ranks, tmp_path)


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


# -- the average -------------------------------------------------------------------------------------------------------


def test_the_average_follows_the_weights_and_predicts() -> None:
    torch.manual_seed(0)
    averaged = Averaged(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), 0.75)
    expected = {name: value.clone().double() for name, value in averaged.network.state_dict().items()}
    optimizer = torch.optim.SGD([p for p in averaged.parameters() if p.requires_grad], 0.1)
    for _ in range(5):
        averaged(torch.randn(6, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        averaged.update()
        for name, value in averaged.network.state_dict().items():
            count = name.endswith("num_batches_tracked")
            expected[name] = value.double() if count else 0.75 * expected[name] + 0.25 * value.double()
    for name, value in average_weights(averaged.state_dict()).items():
        torch.testing.assert_close(value.double(), expected[name], rtol=1e-5, atol=1e-6)
    x = torch.randn(2, 3)
    averaged.eval()
    assert torch.equal(averaged(x), averaged.average(x))
    assert all(parameter.grad is None for parameter in averaged.average.parameters())


# -- settings and runs -------------------------------------------------------------------------------------------------

CONFIG = """
data: {root: shards, split: train, recipe: digits, labels: wrong, backend: cpu, threads: 1}
model: {name: small_conv}
method: {onset: 1, mixup: 1.0, ema: 0.5}
optim: {lr: 0.05}
train: {epochs: 3, batch: 9}
engine: {threads: 1}
evaluate: {splits: {val: val}}
log: {every: 1, wandb: 'off'}
"""


@pytest.mark.parametrize(
    ("key", "value"), [("mixup", -1.0), ("mixup", float("inf")), ("mixup_alpha", 0.0), ("ema", 1.0), ("ema", -0.1)]
)
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
    with pytest.raises(ConfigError, match=r"method\.ema: needs full weights .* engine\.zero = 3"):
        configs.load("plus.yaml", ["engine.kind=deepspeed", "engine.zero=3"])
    with pytest.raises(ConfigError, match=r"method\.mixup: needs the full batch"):
        configs.load("plus.yaml", ["train.accumulate=2"])


def test_the_average_is_evaluated_saved_and_exported(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_config("plus.yaml", ["run.name=plus"]) == 0
    run = workspace / "runs" / "plus"
    summary = json.loads((run / "summary.json").read_text())
    capsys.readouterr()
    assert main(["eval", "runs/plus", "--which", "last", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["val"]["top1"] == summary["last"]["val/top1"]
    assert main(["checkpoint", "export", "runs/plus", "--what", "network", "--out", "exported"]) == 0
    average = average_weights(read_tensors(run / "network-last.safetensors"))
    exported = read_tensors(workspace / "exported" / "model.safetensors")
    assert exported.keys() == average.keys()
    assert all(torch.equal(exported[name], value) for name, value in average.items())


@pytest.mark.usefixtures("workspace")
def test_mixup_starts_at_the_onset() -> None:
    def losses(name: str, *overrides: str) -> list[float]:
        assert run_config("plus.yaml", [f"run.name={name}", *overrides]) == 0
        lines = map(json.loads, Path(f"runs/{name}/metrics.jsonl").read_text().splitlines())
        return [line["loss"] for line in lines if line["kind"] == "train"]

    with_mixup, without = losses("with"), losses("without", "method.mixup=0")
    assert with_mixup[:7] == without[:7], "one epoch has 7 steps"
    assert with_mixup[7] > without[7]
