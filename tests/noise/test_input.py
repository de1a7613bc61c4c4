"""Bad input and bad settings get a clear error and change nothing; torch's global defaults change nothing either."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from sopdist import SOP
from tests.support.batches import LAYOUTS, batch, same, snapshot

GOOD = batch(4, 5, 20)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"index": torch.tensor([0, 1, 2, 20])}, IndexError, r"index\[3\] = 20 is outside \[0, num_samples = 20\)"),
        ({"index": torch.tensor([0, -1, 2, 3])}, IndexError, r"index\[1\] = -1"),
        ({"labels": torch.tensor([0, 5, 2, 3])}, IndexError, r"labels\[1\] = 5 is outside \[0, num_classes = 5\)"),
        ({"labels": torch.tensor([0, 1, 2, -1])}, IndexError, r"labels\[3\] = -1"),
        ({"labels": torch.tensor([0.0, 1, 2, 3])}, TypeError, "labels must be integers, got float32"),
        ({"index": torch.tensor([True, False, True, True])}, TypeError, "index must be integers, got bool"),
        ({"index": torch.tensor([0, 1, 2])}, ValueError, r"index must have shape \(4,\)"),
        ({"labels": torch.zeros(4, 1, dtype=torch.int64)}, ValueError, r"labels must have shape \(4,\)"),
        ({"logits": torch.zeros(4, 6)}, ValueError, "logits have 6 classes, .* num_classes=5"),
        ({"logits": torch.zeros(20)}, ValueError, r"logits must be floats of shape \(batch, classes\)"),
        ({"logits": torch.zeros(4, 5, dtype=torch.int64)}, ValueError, "got int64"),
        ({"logits": torch.zeros(4, 5, device="meta")}, ValueError, "logits are on meta, .* is on cpu: call sop.to"),
        ({"index": torch.zeros(4, dtype=torch.int64, device="meta")}, ValueError, "index is on meta"),
        ({"weight": torch.ones(3)}, ValueError, r"weight must be floats or a bool mask of shape \(4,\)"),
        ({"weight": torch.ones(4, dtype=torch.int64)}, ValueError, "weight must be floats or a bool mask"),
        ({"weight": torch.tensor([1.0, -1, 1, 1])}, ValueError, r"weight\[1\] = -1.0 is not a finite number >= 0"),
        ({"weight": torch.tensor([1.0, 1, float("nan"), 1])}, ValueError, r"weight\[2\] = nan"),
        ({"logits2": torch.zeros(4, 5)}, ValueError, "logits2 has no effect with consistency=0"),
        ({"labels": [0, 1, 2, 3]}, TypeError, "labels must be a tensor, got list"),
        ({"index": None}, TypeError, "index must be a tensor, got NoneType"),
        ({"weight": torch.tensor([1.0, 1e300, 1, 1], dtype=torch.float64)}, ValueError, r"weight\[1\] = inf"),
    ],
)
def test_bad_input_gets_a_clear_error_and_changes_nothing(
    change: dict[str, Tensor], error: type[Exception], says: str
) -> None:
    sop = SOP(20, 5)
    before = snapshot(sop)
    arguments: dict[str, Any] = dict(zip(("logits", "labels", "index"), GOOD, strict=True)) | change
    with pytest.raises(error, match=says):
        sop(**arguments)
    assert same(before, snapshot(sop))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"num_samples": 0}, "num_samples must be an integer at least 1"),
        ({"num_samples": 2.5}, "num_samples must be an integer"),
        ({"num_classes": 1}, "num_classes must be an integer at least 2"),
        ({"variant": "flwo"}, "variant must be one of 'flow', 'paper', 'official', got 'flwo'"),
        ({"visits": 0}, r"visits must be in \[0.01, 1e\+12\], got 0"),
        ({"visits": float("nan")}, "visits must be in .* got nan"),
        ({"alpha_v": 3.0}, "alpha_v belongs to variant='paper'; variant='flow' takes visits"),
        ({"variant": "paper", "visits": 3}, "visits belongs to variant='flow'"),
        ({"variant": "paper", "tau": -1}, r"tau must be in \[0, 1e\+06\]"),
        ({"variant": "official", "batch_size": 0}, "batch_size must be an integer >= 1"),
        ({"variant": "official", "batch_size": float("nan")}, "batch_size must be an integer"),
        ({"num_classes": 2_000_000}, "eps must be in"),
        ({"layout": "sparse"}, "layout must be 'auto', 'dense' or 'slots'"),
        ({"slots": 0}, "slots must be an integer at least 1"),
        ({"seed": -1}, "seed must be an integer in"),
        ({"eps": 0.5}, "eps must be in"),
        ({"eps": 1e-9}, "eps must be in"),
        ({"reduction": "median"}, "reduction must be"),
        ({"consistency": -0.1}, "consistency must be a finite number >= 0"),
        ({"balance": float("inf")}, "balance must be a finite number >= 0"),
        ({"balance": 0.1, "reduction": "none"}, "are computed over the batch"),
        ({"prior": torch.ones(5)}, "prior has no effect with balance=0"),
        ({"balance": 0.1, "prior": torch.ones(4)}, "prior must be num_classes = 5 numbers"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        SOP(**({"num_samples": 20, "num_classes": 5} | settings))


def test_tau_is_only_for_the_papers_variant() -> None:
    sop = SOP(20, 5, variant="paper")
    sop.tau = 0.5
    assert sop.rates.step().v == pytest.approx(4 * 10 * 0.5)
    with pytest.raises(TypeError, match="tau belongs to variant='paper'"):
        SOP(20, 5).tau = 0.1
    with pytest.raises(TypeError, match="tau belongs to variant='paper'"):
        _ = SOP(20, 5).tau


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_another_default_type_changes_nothing(
    dtype: torch.dtype, layout: Any, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOPDIST_KERNELS", kernels)
    z, labels, index = batch(6, 5, 20)
    default = SOP(20, 5, layout=layout, balance=0.1)
    expected = [float(default(z, labels, index)) for _ in range(6)]
    torch.set_default_dtype(dtype)
    try:
        other = SOP(20, 5, layout=layout, balance=0.1)
        got = [float(other(z, labels, index)) for _ in range(6)]
    finally:
        torch.set_default_dtype(torch.float32)
    assert got == expected
    assert same(default.state_dict(), other.state_dict())
    assert other.prior is not None
    assert other.prior.dtype == torch.float32


def test_another_default_device_changes_nothing() -> None:
    z, labels, index = batch(6, 5, 20)
    sop, default = SOP(20, 5), SOP(20, 5)
    with torch.device("meta"):
        loss = float(sop(z, labels, index))
    assert loss == float(default(z, labels, index))


def test_a_table_of_the_wrong_dtype_is_refused_before_the_c_kernels_run() -> None:
    sop = SOP(20, 5)
    sop.table.v = sop.table.v.bfloat16()
    with pytest.raises(TypeError, match=r"contiguous float32 on the CPU, found torch\.bfloat16"):
        sop(*batch(6, 5, 20))


def make_sop_in_a_group(rank: int, ranks: int, store: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        SOP(20, 5)
    messages = [str(warning.message) for warning in caught if "has its own table" in str(warning.message)]
    assert len(messages) == (1 if ranks > 1 else 0)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("ranks", [1, 2])
def test_several_ranks_without_a_group_are_warned_that_each_has_its_own_table(ranks: int, tmp_path: Any) -> None:
    torch.multiprocessing.spawn(make_sop_in_a_group, (ranks, str(tmp_path / "store")), ranks)


def test_share_memory_includes_the_table_and_to_empty_is_refused() -> None:
    assert SOP(20, 5).share_memory().table.u.is_shared()
    with pytest.raises(RuntimeError, match="create the table on its final device"):
        SOP(20, 5, device="meta").to_empty(device="cpu")


def test_losses_without_reduction_may_be_changed_in_place() -> None:
    losses = SOP(20, 5, reduction="none")(*batch(6, 5, 20))
    losses *= 2
    losses[0] = 0


def test_logits_too_large_for_a_finite_loss_are_dropped() -> None:
    z, labels, index = batch(3, 5, 20)
    z[1, 0], z[1, 1], labels[1] = 3e38, -3e38, 1
    sop = SOP(20, 5)
    assert torch.isfinite(sop(z, labels, index))
    assert sop.skipped.tolist() == [0, 1]
    assert torch.isfinite(sop.table.mean_loss).all()
