"""The module as a user meets it: duplicates, dropped samples, bad input, SOP+, reading the result."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sopdist import SOP
from sopdist.noise import InactiveTableWarning

VARIANTS = ("flow", "paper", "official")
LAYOUTS = ("dense", "slots")


def batch(count: int, classes: int, samples: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(count, classes, generator=generator) * 3
    index = torch.randperm(samples, generator=generator)[:count]
    return z, torch.randint(classes, (count,), generator=generator), index


def snapshot(sop: SOP) -> dict[str, Tensor]:
    return copy.deepcopy(dict(sop.state_dict()))


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# -- visits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 16))
def test_duplicates_are_consecutive_visits_in_batch_order(layout: Any, seed: int, samples: int, count: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    together, apart = (SOP(samples, 6, layout=layout, slots=3) for _ in range(2))
    for _ in range(5):
        z = torch.randn(count, 6, generator=generator) * 3
        index = torch.randint(samples, (count,), generator=generator)
        labels = index % 6
        together(z, labels, index)
        for i in range(count):  # flow's facts do not depend on the row, so one by one is the same
            apart(z[i : i + 1], labels[i : i + 1], index[i : i + 1])
    assert same(together.table.state_dict(), apart.table.state_dict())


@pytest.mark.parametrize("variant", VARIANTS)
def test_all_samples_of_a_batch_read_the_table_as_it_was_before(variant: Any) -> None:
    rates = {"paper": {"alpha_v": 300.0, "alpha_u": 30.0}, "official": {"lr_u": 100.0, "lr_v": 300.0}}.get(variant, {})
    sop = SOP(1, 4, variant=variant, reduction="none", **rates)
    z = torch.tensor([[3.0, 0.0, 0.0, 0.0]]).repeat(3, 1)
    for _ in range(4):
        losses = sop(z, torch.ones(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))
        assert losses[0] == losses[1] == losses[2]
    assert int(sop.table.visits[0]) == 12


def test_in_eval_mode_and_without_gradients_nothing_is_learned() -> None:
    sop = SOP(20, 5)
    before = snapshot(sop)
    with torch.no_grad():
        sop(*batch(8, 5, 20))
    sop.eval()(*batch(8, 5, 20))
    assert same(before, snapshot(sop))


def test_print_tells_how_much_was_seen() -> None:
    sop = SOP(20, 5)
    sop(*batch(8, 5, 20))
    assert "8 of 20 samples visited" in repr(sop)
    assert "Flow(visits=4.0)" in repr(sop)
    assert sop.suspects(20).shape == (8,)  # samples that were never seen are no suspects


def test_a_compiled_training_step_learns_what_an_eager_one_does() -> None:
    z, labels, index = batch(8, 5, 20)
    eager, compiled = SOP(20, 5), SOP(20, 5)
    step = torch.compile(lambda z: compiled(z * 2, labels, index) * 3, backend="eager")
    for _ in range(5):
        assert float(step(z)) == float(eager(z * 2, labels, index) * 3)
    assert same(eager.state_dict(), compiled.state_dict())


# -- samples that do not count -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_a_sample_that_is_not_finite_is_as_if_it_were_not_there(variant: Any, layout: Any, poison: float) -> None:
    z, labels, index = batch(6, 5, 20)
    z[2, 3] = poison
    with_it, without = (SOP(20, 5, variant=variant, layout=layout) for _ in range(2))
    rest = torch.tensor([0, 1, 3, 4, 5])
    a, b = z.clone().requires_grad_(), z[rest].clone().requires_grad_()
    for _ in range(3):
        loss_a, loss_b = with_it(a, labels, index), without(b, labels[rest], index[rest])
        torch.testing.assert_close(loss_a, loss_b)
    loss_a.backward()
    loss_b.backward()
    assert a.grad is not None
    assert b.grad is not None
    assert torch.equal(a.grad[2], torch.zeros(5))
    torch.testing.assert_close(a.grad[rest], b.grad)
    assert with_it.skipped.tolist() == [0, 3]
    with_it.skipped.zero_()
    assert same(with_it.state_dict(), without.state_dict())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sample_of_weight_0_leaves_its_row_alone_and_is_counted(layout: Any) -> None:
    z, labels, index = batch(6, 5, 20)
    z[5] = float("nan")
    sop = SOP(20, 5, layout=layout)
    before = snapshot(sop)
    loss = sop(z, labels, index, weight=torch.tensor([0.0, 1, 1, 0, 1, 1]))
    assert torch.isfinite(loss)
    assert sop.skipped.tolist() == [2, 1]
    visited = sop.table.visits.nonzero()[:, 0].tolist()
    assert sorted(visited) == sorted(index[[1, 2, 4]].tolist())
    untouched = torch.ones(20, dtype=torch.bool)
    untouched[index[[1, 2, 4]]] = False
    assert torch.equal(sop.table.u[untouched], before["table.u"][untouched])


def test_a_batch_in_which_nothing_counts_has_loss_0_and_gradient_0() -> None:
    for settings in ({}, {"balance": 0.1, "consistency": 0.9}):
        sop = SOP(20, 5, **settings)
        z, labels, index = batch(4, 5, 20)
        z = torch.full_like(z, float("nan")).requires_grad_()
        loss = sop(z, labels, index, logits2=z if settings else None)
        loss.backward()
        assert float(loss.detach()) == 0
        assert z.grad is not None
        assert not z.grad.any()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_an_empty_batch_changes_nothing_and_has_loss_0(reduction: Any) -> None:
    sop = SOP(20, 5, reduction=reduction)
    before = snapshot(sop)
    z = torch.empty(0, 5, requires_grad=True)
    none = torch.empty(0, dtype=torch.int64)
    loss = sop(z, none, none)
    loss.sum().backward()
    assert float(loss.detach().sum()) == 0
    assert loss.shape == ((0,) if reduction == "none" else ())
    assert same(before, snapshot(sop))


def test_the_first_sample_that_is_not_finite_is_told_and_a_mask_is_a_weight() -> None:
    z, labels, index = batch(6, 5, 20)
    z[2] = float("nan")
    sop = SOP(20, 5)
    with pytest.warns(UserWarning, match="1 of 6 samples of a batch have logits that are not finite"):
        first = sop(z, labels, index)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sop(z, labels, index)
        masked = SOP(20, 5)(z, labels.to(torch.uint8), index.to(torch.int32), weight=torch.arange(6) != 2)
    assert float(first) == float(masked)


def test_without_validation_samples_out_of_range_are_dropped_and_counted() -> None:
    sop = SOP(20, 5, validate=False)
    z, labels, index = batch(6, 5, 20)
    labels[0], labels[1], index[2], index[3] = 5, -1, 20, -7
    loss = sop(z, labels, index)
    assert torch.isfinite(loss)
    assert sop.skipped.tolist() == [4, 0]
    assert int(sop.table.visits.sum()) == 2


# -- bad input ---------------------------------------------------------------------------------------------------------

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
        ({"index": torch.tensor([0, 1, 2])}, ValueError, r"index must have the shape \(4,\)"),
        ({"labels": torch.zeros(4, 1, dtype=torch.int64)}, ValueError, r"labels must have the shape \(4,\)"),
        ({"logits": torch.zeros(4, 6)}, ValueError, "logits have 6 classes, .* num_classes=5"),
        ({"logits": torch.zeros(20)}, ValueError, r"logits must be floats of shape \(batch, classes\)"),
        ({"logits": torch.zeros(4, 5, dtype=torch.int64)}, ValueError, "got int64"),
        ({"logits": torch.zeros(4, 5, device="meta")}, ValueError, "logits are on meta, .* is on cpu: call sop.to"),
        ({"index": torch.zeros(4, dtype=torch.int64, device="meta")}, ValueError, "index is on meta"),
        ({"weight": torch.ones(3)}, ValueError, r"weight must be floats or a mask of the shape \(4,\)"),
        ({"weight": torch.ones(4, dtype=torch.int64)}, ValueError, "weight must be floats or a mask"),
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
        ({"variant": "official", "batch_size": 0}, "batch_size must be an integer of at least 1"),
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
        ({"balance": 0.1, "reduction": "none"}, "terms of a whole batch"),
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


# -- the surroundings --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_another_default_type_changes_nothing(
    dtype: torch.dtype, layout: Any, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOPDIST_KERNELS", kernels)
    z, labels, index = batch(6, 5, 20)
    usual = SOP(20, 5, layout=layout, balance=0.1)
    expected = [float(usual(z, labels, index)) for _ in range(6)]
    torch.set_default_dtype(dtype)
    try:
        other = SOP(20, 5, layout=layout, balance=0.1)
        got = [float(other(z, labels, index)) for _ in range(6)]
    finally:
        torch.set_default_dtype(torch.float32)
    assert got == expected
    assert same(usual.state_dict(), other.state_dict())
    assert other.prior is not None
    assert other.prior.dtype == torch.float32


def test_another_default_device_changes_nothing() -> None:
    z, labels, index = batch(6, 5, 20)
    sop, usual = SOP(20, 5), SOP(20, 5)
    with torch.device("meta"):
        loss = float(sop(z, labels, index))
    assert loss == float(usual(z, labels, index))


def test_a_table_that_something_else_has_cast_is_refused_before_c_sees_it() -> None:
    sop = SOP(20, 5)
    sop.table.v = sop.table.v.bfloat16()
    with pytest.raises(TypeError, match=r"contiguous float32 on the CPU, found torch\.bfloat16"):
        sop(*batch(6, 5, 20))


def make_in_a_group(rank: int, ranks: int, store: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        SOP(20, 5)
    told = [str(warning.message) for warning in caught if "a table of its own" in str(warning.message)]
    assert len(told) == (1 if ranks > 1 else 0)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("ranks", [1, 2])
def test_several_ranks_are_told_that_each_has_a_table_of_its_own(ranks: int, tmp_path: Any) -> None:
    torch.multiprocessing.spawn(make_in_a_group, (ranks, str(tmp_path / "store")), ranks)


def test_sharing_memory_reaches_the_table_and_empty_memory_is_refused() -> None:
    assert SOP(20, 5).share_memory().table.u.is_shared()
    with pytest.raises(NotImplementedError, match="make SOP where it is to live"):
        SOP(20, 5, device="meta").to_empty(device="cpu")


def test_losses_without_reduction_are_the_users_own() -> None:
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


# -- SOP+ --------------------------------------------------------------------------------------------------------------


def test_sop_plus_adds_the_two_terms_of_the_method() -> None:
    z, labels, index = batch(6, 5, 20)
    z2 = torch.randn(6, 5, generator=torch.Generator().manual_seed(9))
    weight = torch.tensor([1.0, 2, 0, 1, 0.5, 1])
    prior = torch.tensor([4.0, 3, 2, 1, 0])
    plus = SOP(20, 5, consistency=0.9, balance=0.1, prior=prior)
    plain = SOP(20, 5)
    a, a2, b, b2 = (x.clone().requires_grad_() for x in (z, z2, z, z2))
    loss = plus(a, labels, index, logits2=a2, weight=weight)
    share = (weight / weight.sum()).double()
    p, q = b.double().softmax(1), b2.double().softmax(1)
    target = p.detach()
    kl = (target * (target.log() - q.log())).sum(1)
    mean = (p * share[:, None]).sum(0)
    known = prior.double() / prior.sum()
    balance = sum(
        float(x) * (torch.tensor(float(x)).log() - m.log()) for x, m in zip(known, mean, strict=True) if x > 0
    )
    expected = plain(b, labels, index, weight=weight) + 0.9 * (kl * share).sum() + 0.1 * balance
    torch.testing.assert_close(loss.double(), expected.double(), rtol=1e-5, atol=1e-6)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(a2.grad, b2.grad, rtol=1e-4, atol=1e-6)
    assert same(plus.table.state_dict(), plain.table.state_dict())  # the terms do not touch the rows


def test_a_second_view_that_is_not_finite_drops_the_sample() -> None:
    z, labels, index = batch(4, 5, 20)
    z2 = z.clone()
    z2[1] = float("nan")
    sop = SOP(20, 5, consistency=0.5)
    a, a2 = z.requires_grad_(), z2.requires_grad_()
    loss = sop(a, labels, index, logits2=a2)
    loss.backward()
    assert torch.isfinite(loss)
    assert a.grad is not None
    assert a2.grad is not None
    assert torch.isfinite(a.grad).all()
    assert torch.isfinite(a2.grad).all()
    assert int(sop.table.visits[index[1]]) == 0
    assert sop.skipped.tolist() == [0, 1]


def test_consistency_without_a_second_view_says_what_to_pass() -> None:
    with pytest.raises(ValueError, match="pass the logits of the second one as logits2"):
        SOP(20, 5, consistency=0.5)(*GOOD)


# -- reading the result ------------------------------------------------------------------------------------------------


@pytest.fixture(params=LAYOUTS)
def learned(request: pytest.FixtureRequest) -> SOP:
    """Ten samples with label 0, of which the network insists that 7, 8, 9 are class 3; sample 5 is never visited."""
    sop = SOP(10, 4, layout=request.param, slots=2)
    z = torch.zeros(10, 4)
    z[:7, 0] = 4
    z[7:, 3] = 4
    seen = torch.tensor([0, 1, 2, 3, 4, 6, 7, 8, 9])
    for _ in range(8):
        sop(z[seen], torch.zeros(9, dtype=torch.int64), seen)
    return sop


def test_wrong_labels_are_ranked_flagged_and_relabelled(learned: SOP) -> None:
    given_labels = torch.zeros(10, dtype=torch.int64)
    assert sorted(learned.suspects(3).tolist()) == [7, 8, 9]
    assert learned.flags().tolist() == [False] * 7 + [True] * 3
    assert learned.proposed_labels(given_labels).tolist() == [0] * 7 + [3] * 3
    assert learned.noise_rate() == pytest.approx(3 / 9)
    for kind in ("loss", "margin"):
        scores = learned.noise_scores(kind)
        assert float(scores[7:].min()) > float(scores[:7].max())
        assert scores[5] == -torch.inf  # no evidence, last in every ranking
    p = torch.tensor([4.0, 0, 0, 0]).softmax(0)
    assert float(learned.noise_scores()[0]) == pytest.approx(-float(p[0].log()), rel=1e-5)
    assert float(learned.noise_scores("margin")[0]) == pytest.approx(float(p[1] - p[0]), rel=1e-5)


def test_reading_with_bad_arguments_says_so(learned: SOP) -> None:
    with pytest.raises(ValueError, match="kind must be"):
        learned.noise_scores("variance")
    with pytest.raises(ValueError, match="the labels of all 10 samples, in index order, got int64 of shape"):
        learned.proposed_labels(torch.zeros(9, dtype=torch.int64))
    with pytest.raises(ValueError, match="count must be in"):
        learned.suspects(11)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_hard_sample_that_the_network_gets_right_is_never_flagged(layout: Any, variant: Any) -> None:
    """In `paper` u grows by the cross-entropy alone, to 1."""
    sop = SOP(3, 10, variant=variant, layout=layout)
    z = torch.zeros(3, 10)
    z[:, 4] = 1.5
    for _ in range(400):
        sop(z, torch.full((3,), 4), torch.arange(3))
    if variant == "paper":
        assert float(sop.table.u.abs().min()) == 1
    assert not sop.flags().any()
    assert sop.noise_rate() == 0
    assert sop.proposed_labels(torch.full((3,), 4)).tolist() == [4, 4, 4]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_corrected_label_is_not_held_against_itself(layout: Any) -> None:
    sop, one = SOP(1, 8, layout=layout), torch.tensor([0])
    z = torch.zeros(1, 8)
    z[0, 3] = 4
    for label in [0] * 8 + [3] * 8:  # the network says 3 all along; the label is corrected half way
        sop(z, torch.tensor([label]), one)
    assert not sop.flags(torch.tensor([3])).any()
    assert sop.noise_rate(torch.tensor([3])) == 0
    assert sop.proposed_labels(torch.tensor([3])).tolist() == [3]
    z[0, 5] = 8
    for _ in range(8):
        sop(z, torch.tensor([3]), one)
    assert sop.proposed_labels(torch.tensor([3])).tolist() == [5]


def test_noise_rate_before_the_first_visit_is_nan() -> None:
    assert SOP(5, 3).noise_rate() != SOP(5, 3).noise_rate()


def test_a_clear_conscience_is_restored_when_the_network_changes_its_mind(learned: SOP) -> None:
    z = torch.zeros(3, 4)
    z[:, 0] = 4
    for _ in range(3):
        learned(z, torch.zeros(3, dtype=torch.int64), torch.tensor([7, 8, 9]))
    assert not learned.flags().any()


# -- the forecast ------------------------------------------------------------------------------------------------------


def test_the_papers_clothing1m_setting_warns_that_the_table_never_acts() -> None:
    with pytest.warns(
        InactiveTableWarning, match=r"after about 2,312 visits at the current tau = 0.002, but 10 epochs"
    ):
        SOP(1000, 14, variant="paper", alpha_u=0.1, alpha_v=1, tau=0.002, epochs=10)
    with pytest.warns(InactiveTableWarning, match="Lower `visits`, or train longer"):
        SOP(1000, 14).forecast(2)
    with pytest.raises(ValueError, match="epochs must be a number > 0"):
        SOP(1000, 14, epochs=0)
    with pytest.warns(InactiveTableWarning, match=r"never at the current tau = 0.02"):
        SOP(1000, 14, variant="paper", alpha_v=0.0).forecast(10)


def test_a_setting_that_acts_in_time_does_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        forecast = SOP(1000, 14, epochs=10).forecast(10)
    assert forecast.activates
    assert forecast.visits == 4
    assert "after about 4 visits" in str(forecast)


def test_more_classes_than_the_authors_eps_allows_still_have_a_gradient() -> None:
    """At eps = 1e-4 a fresh network with 22,000 classes would be clipped everywhere."""
    sop = SOP(4, 22_000, layout="slots")
    z = torch.zeros(4, 22_000, requires_grad=True)
    sop(z, torch.arange(4), torch.arange(4)).backward()
    assert z.grad is not None
    assert float(z.grad.gather(1, torch.arange(4)[:, None]).abs().min()) > 0.1
    assert SOP(4, 1000).eps == 1e-4
