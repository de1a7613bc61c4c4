"""`sopdist bench fashion-mnist`: its losses against independent formulas, its data and noise, and real runs."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from sopdist.bench.fashion_mnist import batches
from sopdist.bench.fashion_mnist_data import DEFAULT_DATA, NOISES, generator, read_idx
from sopdist.bench.robust_losses import ELR, GCE, SL, cross_entropy
from sopdist.errors import DataError

B, K, N = 16, 5, 40


@pytest.fixture
def batch() -> tuple[Tensor, Tensor, Tensor]:
    draws = torch.Generator().manual_seed(3)
    logits = 2 * torch.randn(B, K, dtype=torch.float64, generator=draws)
    index = torch.randperm(N, generator=draws)[:B]
    return logits, torch.randint(K, (B,), generator=draws), index


def softmax(logits: Tensor) -> np.ndarray:
    powers = np.exp(logits.detach().numpy())
    return powers / powers.sum(1, keepdims=True)


# -- the losses --------------------------------------------------------------------------------------------------------


def test_gce_tends_to_cross_entropy_as_q_falls(batch: tuple[Tensor, Tensor, Tensor]) -> None:
    expected = cross_entropy(*batch)
    gaps = [float((GCE(q)(*batch) - expected).abs()) for q in (1e-1, 1e-3, 1e-5, 1e-7)]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[-1] < 1e-5


def test_gce_is_the_published_formula(batch: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, labels, _ = batch
    p_y = softmax(logits)[np.arange(B), labels.numpy()]
    assert float(GCE(0.7)(*batch)) == pytest.approx(np.mean((1 - p_y**0.7) / 0.7), rel=1e-12)


def test_gce_has_a_finite_gradient_where_the_label_has_probability_zero() -> None:
    logits = torch.tensor([[0.0, 500.0]], requires_grad=True)
    GCE()(logits, torch.tensor([0]), torch.tensor([0])).backward()
    assert logits.grad is not None
    assert bool(logits.grad.isfinite().all())


def test_sl_without_its_reverse_term_is_cross_entropy(batch: tuple[Tensor, Tensor, Tensor]) -> None:
    torch.testing.assert_close(SL(alpha=1.0, beta=0.0)(*batch), cross_entropy(*batch), rtol=1e-12, atol=0)


def test_sl_adds_the_cross_entropy_of_the_label_under_the_prediction(batch: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, labels, _ = batch
    p, log_label = softmax(logits), np.where(np.eye(K)[labels.numpy()] == 1, 0.0, np.log(1e-4))
    expected = 0.1 * float(cross_entropy(*batch)) - (p * log_label).sum(1).mean()
    assert float(SL(alpha=0.1, beta=1.0)(*batch)) == pytest.approx(expected, rel=1e-12)


def test_elr_targets_are_the_moving_average_of_the_predictions(batch: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, labels, index = batch
    elr = ELR(N, K, beta=0.7)
    elr(logits, labels, index)
    elr(-logits, labels, index)
    clamped = [softmax(z).clip(1e-4, 1 - 1e-4) for z in (logits, -logits)]
    first, second = (p / p.sum(1, keepdims=True) for p in clamped)
    np.testing.assert_allclose(elr.targets[index].numpy(), 0.7 * 0.3 * first + 0.3 * second, rtol=1e-6)
    untouched = np.setdiff1d(np.arange(N), index.numpy())
    assert not elr.targets[untouched].any()


def test_elr_gradient_is_the_one_derived_manually(batch: tuple[Tensor, Tensor, Tensor]) -> None:
    """d/dz = p - onehot(y) - strength p (t - <p, t>) / (1 - <p, t>), with t after its update as a constant."""
    logits, labels, index = batch
    elr = ELR(N, K, strength=3.0)
    elr(-logits, labels, index)  # so that the targets differ from the current predictions
    z = logits.clone().requires_grad_()
    elr(z, labels, index).backward()

    p, t = softmax(logits), elr.targets[index].double().numpy()
    assert p.min() > 1e-4  # clamping does not affect this gradient
    agreement = (p * t).sum(1, keepdims=True)
    expected = (p - np.eye(K)[labels.numpy()] - 3 * p * (t - agreement) / (1 - agreement)) / B
    assert z.grad is not None
    np.testing.assert_allclose(z.grad.numpy(), expected, atol=1e-7)


# -- labels, batches and files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("noise", "wrong"), [("sym-40", 0.36), ("sym-60", 0.54), ("asym-40", 0.28)])
def test_noise_has_the_stated_rate(noise: str, wrong: float) -> None:
    clean = torch.arange(100_000) % 10
    noisy = NOISES[noise](clean, generator(0, "noise"))
    assert float((noisy != clean).float().mean()) == pytest.approx(wrong, abs=0.01)
    assert torch.equal(noisy, NOISES[noise](clean, generator(0, "noise")))
    assert not torch.equal(noisy, NOISES[noise](clean, generator(1, "noise")))


def test_symmetric_noise_is_uniform_over_all_classes() -> None:
    noisy = NOISES["sym-40"](torch.zeros(100_000, dtype=torch.int64), generator(0, "noise"))
    shares = noisy.bincount(minlength=10) / len(noisy)
    torch.testing.assert_close(shares, torch.tensor([0.64] + [0.04] * 9), rtol=0, atol=0.005)


def test_asymmetric_noise_confuses_only_similar_classes() -> None:
    clean = torch.arange(10_000) % 10
    noisy = NOISES["asym-40"](clean, generator(0, "noise"))
    pairs = {(int(a), int(b)) for a, b in zip(clean, noisy, strict=True) if a != b}
    assert pairs == {(0, 6), (6, 0), (2, 4), (4, 2), (5, 7), (7, 5), (9, 7)}


def test_an_epoch_visits_each_sample_at_most_once_in_full_batches() -> None:
    steps = list(batches(300, epochs=2, order=generator(0, "order")))
    assert [len(step) for step in steps] == [128] * 4
    epochs = [torch.cat(steps[:2]), torch.cat(steps[2:])]
    assert all(len(epoch.unique()) == 256 for epoch in epochs)
    assert not torch.equal(*epochs)


def write_idx(path: Path, content: bytes) -> Path:
    path.write_bytes(gzip.compress(content))
    return path


def test_idx_files_are_read(tmp_path: Path) -> None:
    header = bytes((0, 0, 8, 2)) + (2).to_bytes(4, "big") + (3).to_bytes(4, "big")
    path = write_idx(tmp_path / "values.gz", header + bytes(range(6)))
    assert read_idx(path, (3,)).tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\0\0\x08\x03" + b"\0\0\0\x02" + b"ab", "of 1 dimensions .*00 00 08 03"),
        (b"\0\0\x08\x01" + b"\0\0", "header; copy"),
        (b"\0\0\x08\x01" + b"\0\0\0\x02" + b"a", "9 bytes, .*10"),
        (b"\0\0\x08\x01" + b"\0\0\0\x02" + b"abc", "too long: 11 bytes, .*10"),
    ],
)
def test_a_bad_idx_file_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=f"labels.gz: .*{message}"):
        read_idx(write_idx(tmp_path / "labels.gz", content), ())


@pytest.mark.parametrize("cut", [5, 40])
def test_a_cut_off_gzip_file_is_named(tmp_path: Path, cut: int) -> None:
    path = write_idx(tmp_path / "labels.gz", bytes(range(256)))
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(DataError, match=r"labels.gz: damaged or"):
        read_idx(path, ())


# -- the command -------------------------------------------------------------------------------------------------------


def run_bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sopdist", "bench", "fashion-mnist", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


def test_a_small_benchmark_prints_tables_and_writes_json(tmp_path: Path) -> None:
    if not DEFAULT_DATA.is_dir():
        pytest.skip(f"Fashion-MNIST is not in {DEFAULT_DATA}: apt-get install dataset-fashion-mnist")
    out = tmp_path / "new" / "folder" / "small.json"
    small = ["--train", "2000", "--epochs", "2", "--seeds", "1", "--methods", "ce,sop-flow", "--noise", "sym-40"]
    done = run_bench(*small, "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert "| ce |" in done.stdout
    assert "| sop-flow | sym-40 |" in done.stdout

    written = json.loads(out.read_text())
    assert written["versions"]["torch"] == torch.__version__
    assert "sopdist" in written["versions"]
    settings = {"train": 2000, "test": 10_000, "epochs": 2, "seeds": 1, "methods": ["ce", "sop-flow"], "lr": 0.02}
    assert settings.items() <= written["settings"].items()
    ce, flow = written["runs"]
    assert (ce["method"], flow["method"]) == ("ce", "sop-flow")
    assert ce["true_noise_rate"] == flow["true_noise_rate"] == pytest.approx(0.36, abs=0.04)
    for run in (ce, flow):
        assert run["test_accuracy"] > 0.6
        assert 0 <= run["memorised"] <= 1
        assert run["seconds"] > 0
    assert ce["detection"] is None
    assert flow["detection"]["auroc_loss"] > 0.8
    assert flow["detection"]["auroc_margin"] > 0.8
    assert flow["detection"]["flag_precision"] is None  # two visits are too few to flag anything
    assert flow["detection"]["noise_rate"] == 0


def test_missing_data_is_an_error_that_names_the_package_to_install(tmp_path: Path) -> None:
    done = run_bench("--data", str(tmp_path / "nowhere"), "--out", str(tmp_path / "out.json"))
    assert done.returncode != 0
    assert "dataset-fashion-mnist" in done.stderr
    assert "--data" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_method_is_refused_with_the_list_of_methods() -> None:
    done = run_bench("--methods", "ce,magic")
    assert done.returncode == 2
    assert "'magic' is not one of ce, gce, sl, elr, sop, sop-flow" in done.stderr
