"""Gradients of the network, of u and of v against autograd in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sopdist import SOP
from tests.support import oracle

SETTINGS = {
    "flow": {"variant": "flow"},
    "paper": {"variant": "paper", "alpha_u": 0.05, "alpha_v": 0.05, "tau": 0.02},
    "official": {"variant": "official", "lr_u": 0.128, "lr_v": 0.128, "batch_size": 128},
}
STEP = 1e-3  # the resulting step of `paper` and `official`


def random_case(seed: int, batch: int, classes: int, scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits, labels, u and v that cover clipped and unclipped entries."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(batch, classes, generator=generator) * scale
    labels = torch.randint(classes, (batch,), generator=generator)
    u = torch.rand(batch, generator=generator) * 2 - 1
    v = torch.randn(batch, classes, generator=generator).clamp(-1, 1)
    v[torch.rand(batch, classes, generator=generator) < 0.5] = 1e-8
    u[torch.rand(batch, generator=generator) < 0.5] = 1e-8
    return z, labels, u, v


def make(variant: str, u: Tensor, v: Tensor, **more: object) -> SOP:
    sop = SOP(len(u), v.shape[1], onset="always", layout="dense", reduction="none", **SETTINGS[variant], **more)
    sop.table.u.copy_(u)
    sop.table.v.copy_(v)
    return sop


def target_term(z: Tensor, u: Tensor, v: Tensor, labels: Tensor) -> Tensor:
    """log(1 - <p, t>) of each sample, with t = 1 - u^2 at the label and v^2 elsewhere."""
    y = oracle.one_hot(labels, v.shape[1])
    square = v.double().square()
    t = (1 - u.double().square())[:, None] * y + square.where(square > 1e-12, 0) * (1 - y)
    return (1 - (z.softmax(1) * t).sum(1).clamp_max(1 - 1e-4)).log()


def check_all(variant: str, z: Tensor, labels: Tensor, u: Tensor, v: Tensor) -> None:
    sop = make(variant, u, v)
    index = torch.arange(len(u))
    expected = oracle.gradients(z, u, v, labels, sop.eps, variant)
    logits = z.double().requires_grad_()
    losses = sop(logits, labels, index)
    losses.sum().backward()
    torch.testing.assert_close(losses.detach(), expected["losses"], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(logits.grad, expected["logits"], rtol=1e-6, atol=1e-7)
    if variant != "flow":
        clip = (lambda x: x.clamp(-1, 1)) if variant == "paper" else (lambda x: x)
        torch.testing.assert_close(sop.table.u.double(), clip(u.double() - STEP * expected["u"]), rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(sop.table.v.double(), clip(v.double() - STEP * expected["v"]), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("variant", SETTINGS)
@given(
    seed=st.integers(0, 10**6),
    batch=st.integers(1, 6),
    classes=st.integers(2, 40),
    scale=st.sampled_from([0.1, 1, 5, 20]),
)
def test_gradients_agree_with_autograd(variant: str, seed: int, batch: int, classes: int, scale: float) -> None:
    check_all(variant, *random_case(seed, batch, classes, scale))


@given(seed=st.integers(0, 10**6), batch=st.integers(1, 6), classes=st.integers(2, 40), scale=st.sampled_from([0.1, 5]))
def test_the_target_term_agrees_with_autograd(seed: int, batch: int, classes: int, scale: float) -> None:
    z, labels, u, v = random_case(seed, batch, classes, scale)
    sop = make("flow", u, v, target=0.7)
    plain = oracle.gradients(z, u, v, labels, sop.eps, "flow")
    logits, again = (z.double().requires_grad_() for _ in range(2))
    term = 0.7 * target_term(again, u, v, labels)
    term.sum().backward()
    losses = sop(logits, labels, torch.arange(batch))
    losses.sum().backward()
    assert again.grad is not None
    torch.testing.assert_close(losses.detach(), plain["losses"] + term.detach(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(logits.grad, plain["logits"] + again.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("variant", SETTINGS)
@pytest.mark.parametrize("classes", [2, 3, 500])
@pytest.mark.parametrize("gap", [-60.0, -12.0, 12.0, 60.0])
def test_gradients_where_the_label_has_probability_near_0_or_1(variant: str, classes: int, gap: float) -> None:
    """p_y -> 0 (w_y below eps, clipped) and p_y -> 1, with and without noise in the row."""
    z, labels, u, v = random_case(3, 8, classes, 1.0)
    z.scatter_add_(1, labels[:, None], torch.full((8, 1), gap))
    check_all(variant, z, labels, u, v)


@pytest.mark.parametrize("variant", SETTINGS)
def test_a_clipped_label_changes_neither_u_nor_its_own_logit(variant: str) -> None:
    z = torch.tensor([[10.0, 0.0, -10.0]], requires_grad=True)
    sop = make(variant, torch.full((1,), 1e-8), torch.full((1, 3), 1e-8))
    sop(z, torch.tensor([2]), torch.tensor([0])).sum().backward()
    assert z.grad is not None
    assert abs(float(z.grad[0, 2])) < 1e-8
    if variant == "paper":
        assert float(sop.table.u[0]) == pytest.approx(1e-8, rel=1e-6)


@pytest.mark.parametrize("layout", ["dense", "slots"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_logits_are_computed_in_float32(dtype: torch.dtype, layout: str) -> None:
    z, labels, _, _ = random_case(5, 16, 30, 4.0)
    z = z.to(dtype)
    half, full = (SOP(16, 30, onset="always", layout=layout, seed=1) for _ in range(2))
    low, high = z.clone().requires_grad_(), z.float().requires_grad_()
    index = torch.arange(16)
    for _ in range(6):  # until the rows carry noise
        a, b = half(low, labels, index), full(high, labels, index)
        low.grad = high.grad = None
        (a * 65536).backward()
        (b * 65536).backward()
        assert a.dtype == torch.float32
        assert torch.equal(a, b)
        assert low.grad is not None
        assert high.grad is not None
        assert torch.equal(low.grad, high.grad.to(dtype))
    assert torch.equal(half.table.v, full.table.v)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_weights_and_reductions_scale_losses_and_gradients(reduction: str) -> None:
    z, labels, u, v = random_case(8, 5, 7, 2.0)
    weight = torch.tensor([1.0, 0.5, 0.0, 2.0, 0.25])
    sop = make("paper", u, v)
    sop.reduction = reduction
    logits = z.double().requires_grad_()
    loss = sop(logits, labels, torch.arange(5), weight=weight)
    loss.sum().backward()
    expected = oracle.gradients(z, u, v, labels, sop.eps, "paper")
    factor = weight.double() / (weight.sum() if reduction == "mean" else 1)
    total = expected["losses"] * factor
    torch.testing.assert_close(loss.detach(), total if reduction == "none" else total.sum(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(logits.grad, expected["logits"] * factor[:, None], rtol=1e-6, atol=1e-7)


def test_a_second_backward_through_a_retained_graph_gives_the_same_gradient() -> None:
    z, labels, _, _ = random_case(2, 4, 6, 1.0)
    z.requires_grad_()
    loss = SOP(4, 6)(z, labels, torch.arange(4))
    (first,) = torch.autograd.grad(loss, z, retain_graph=True)
    (second,) = torch.autograd.grad(loss, z)
    assert torch.equal(first, second)
