"""The loss as users call it: visits, samples that do not count, SOP+, the forecast."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sopdist import SOP
from sopdist.noise import InactiveTableWarning
from tests.support.batches import LAYOUTS, VARIANTS, batch, same, snapshot


@pytest.mark.parametrize("layout", LAYOUTS)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 16))
def test_duplicates_are_consecutive_visits_in_batch_order(layout: Any, seed: int, samples: int, count: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    batched, one_by_one = (SOP(samples, 6, onset="always", layout=layout, slots=3) for _ in range(2))
    for _ in range(5):
        z = torch.randn(count, 6, generator=generator) * 3
        index = torch.randint(samples, (count,), generator=generator)
        labels = index % 6
        batched(z, labels, index)
        for i in range(count):  # flow's facts do not depend on the row, so one by one is the same
            one_by_one(z[i : i + 1], labels[i : i + 1], index[i : i + 1])
    assert same(batched.table.state_dict(), one_by_one.table.state_dict())


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
    sop = SOP(20, 5, onset="always")
    before = snapshot(sop)
    with torch.no_grad():
        sop(*batch(8, 5, 20))
    sop.eval()(*batch(8, 5, 20))
    assert same(before, snapshot(sop))


def test_repr_shows_how_many_samples_were_visited() -> None:
    sop = SOP(20, 5, onset="always")
    sop(*batch(8, 5, 20))
    assert "8 of 20 samples visited" in repr(sop)
    assert "Flow(visits=4.0)" in repr(sop)
    assert sop.suspects(20).shape == (8,)  # samples that were never visited are not suspects


def test_a_compiled_training_step_learns_what_an_eager_one_does() -> None:
    z, labels, index = batch(8, 5, 20)
    eager, compiled = (SOP(20, 5, onset="always") for _ in range(2))
    step = torch.compile(lambda z: compiled(z * 2, labels, index) * 3, backend="eager")
    for _ in range(5):
        assert float(step(z)) == float(eager(z * 2, labels, index) * 3)
    assert same(eager.state_dict(), compiled.state_dict())


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_a_sample_that_is_not_finite_is_ignored(variant: Any, layout: Any, poison: float) -> None:
    z, labels, index = batch(6, 5, 20)
    z[2, 3] = poison
    poisoned, clean = (SOP(20, 5, variant=variant, onset="always", layout=layout) for _ in range(2))
    rest = torch.tensor([0, 1, 3, 4, 5])
    a, b = z.clone().requires_grad_(), z[rest].clone().requires_grad_()
    for _ in range(3):
        loss_a, loss_b = poisoned(a, labels, index), clean(b, labels[rest], index[rest])
        torch.testing.assert_close(loss_a, loss_b)
    loss_a.backward()
    loss_b.backward()
    assert a.grad is not None
    assert b.grad is not None
    assert torch.equal(a.grad[2], torch.zeros(5))
    torch.testing.assert_close(a.grad[rest], b.grad)
    assert poisoned.skipped.tolist() == [0, 3]
    poisoned.skipped.zero_()
    assert same(poisoned.state_dict(), clean.state_dict())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sample_of_weight_0_leaves_its_row_unchanged_and_is_counted(layout: Any) -> None:
    z, labels, index = batch(6, 5, 20)
    z[5] = float("nan")
    sop = SOP(20, 5, onset="always", layout=layout)
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


def test_the_first_sample_that_is_not_finite_is_reported_and_a_mask_is_a_weight() -> None:
    z, labels, index = batch(6, 5, 20)
    z[2] = float("nan")
    sop = SOP(20, 5)
    with pytest.warns(UserWarning, match="1 of 6 samples in a batch have logits that are not finite"):
        first = sop(z, labels, index)
    for settings, weight in (({}, torch.tensor([0.0, 1, 1, 1, 1, 1])), ({"validate": False}, None)):
        with pytest.warns(UserWarning, match="1 of 6 samples in a batch have logits that are not finite"):
            SOP(20, 5, **settings)(z, labels, index, weight=weight)
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


def test_sop_plus_adds_the_two_terms_of_the_method() -> None:
    z, labels, index = batch(6, 5, 20)
    z2 = torch.randn(6, 5, generator=torch.Generator().manual_seed(9))
    weight = torch.tensor([1.0, 2, 0, 1, 0.5, 1])
    prior = torch.tensor([4.0, 3, 2, 1, 0])
    plus = SOP(20, 5, onset="always", consistency=0.9, balance=0.1, prior=prior)
    plain = SOP(20, 5, onset="always")
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
    assert same(plus.table.state_dict(), plain.table.state_dict())  # the terms do not change the rows


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
    with pytest.raises(ValueError, match="pass the logits of the second view as logits2"):
        SOP(20, 5, consistency=0.5)(*batch(4, 5, 20))


def test_the_papers_clothing1m_setting_warns_that_the_table_never_acts() -> None:
    with pytest.warns(
        InactiveTableWarning, match=r"after about 2,312 visits at the current tau = 0.002, but 10 epochs"
    ):
        SOP(1000, 14, variant="paper", alpha_u=0.1, alpha_v=1, tau=0.002, epochs=10)
    with pytest.warns(InactiveTableWarning, match="Lower `visits`, or train longer"):
        SOP(1000, 14, onset="always").forecast(2)
    with pytest.warns(InactiveTableWarning, match="acts in epoch 5 at the earliest, but 4 epochs"):
        SOP(1000, 14, epochs=4)
    with pytest.raises(ValueError, match="epochs must be a number > 0"):
        SOP(1000, 14, epochs=0)
    with pytest.warns(InactiveTableWarning, match=r"never at the current tau = 0.02"):
        SOP(1000, 14, variant="paper", alpha_v=0.0).forecast(10)


def test_a_setting_that_acts_in_time_does_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        forecast = SOP(1000, 14, onset="always", epochs=10).forecast(10)
        waits = SOP(1000, 14, epochs=10).forecast(10)
    assert forecast.activates
    assert forecast.visits == 4
    assert "after about 4 visits" in str(forecast)
    assert waits.activates
    assert "acts in epoch 5 at the earliest" in str(waits)


def test_more_classes_than_the_authors_eps_allows_still_have_a_gradient() -> None:
    """At eps = 1e-4 a fresh network with 22,000 classes would be clipped everywhere."""
    sop = SOP(4, 22_000, onset="always", layout="slots")
    z = torch.zeros(4, 22_000, requires_grad=True)
    sop(z, torch.arange(4), torch.arange(4)).backward()
    assert z.grad is not None
    assert float(z.grad.gather(1, torch.arange(4)[:, None]).abs().min()) > 0.1
    assert SOP(4, 1000).eps == 1e-4
