"""Methods that are a loss per sample: values and gradients against autograd in float64 on the formulas themselves."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from sopdist.data.batch import Batch
from sopdist.methods import METHODS, Method, Setup
from sopdist.methods.ce import CESettings
from sopdist.methods.forward import ForwardCorrection, ForwardSettings
from sopdist.methods.gce import GCESettings
from sopdist.methods.method import LossMethod, MethodSettings
from sopdist.methods.sl import SLSettings

CLASSES, BATCH = 5, 16


def probability(logits: Tensor, labels: Tensor) -> Tensor:
    exponents = (logits - logits.max(1, keepdim=True).values).exp()
    return exponents[torch.arange(len(labels)), labels] / exponents.sum(1)


def gce(q: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda logits, labels: (1 - probability(logits, labels) ** q) / q


def sl(alpha: float, beta: float, log_zero: float) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        onehot = torch.nn.functional.one_hot(labels, CLASSES)
        reverse = -(logits.softmax(1) * torch.where(onehot == 1, 0.0, log_zero)).sum(1)
        return -alpha * probability(logits, labels).log() + beta * reverse

    return loss


def forward_corrected(logits: Tensor, labels: Tensor) -> Tensor:
    """-log sum_i p_i T_iy."""
    exponents = (logits - logits.max(1, keepdim=True).values).exp()
    p = exponents / exponents.sum(1, keepdim=True)
    return -(p @ TRANSITION.to(p))[torch.arange(len(labels)), labels].log()


TRANSITION = torch.full((CLASSES, CLASSES), 0.3 / (CLASSES - 1)).fill_diagonal_(0.7)
CASES: dict[str, tuple[MethodSettings, Callable[[Tensor, Tensor], Tensor]]] = {
    "ce": (CESettings(), lambda logits, labels: -probability(logits, labels).log()),
    "forward": (ForwardSettings(first_epochs=1), forward_corrected),
    "forward, before": (ForwardSettings(), lambda logits, labels: -probability(logits, labels).log()),
    "gce": (GCESettings(), gce(0.7)),
    "gce, mean absolute error": (GCESettings(q=1.0), gce(1.0)),
    "sl": (SLSettings(), sl(0.1, 1.0, math.log(1e-4))),
    "sl, CIFAR-100": (SLSettings(alpha=6.0, beta=0.1, log_zero=-4.0), sl(6.0, 0.1, -4.0)),
}


def make(settings: MethodSettings) -> Method:
    """The method in epoch 1 of 4; if there is a transition matrix by then, it is `TRANSITION`."""
    method = METHODS[settings.name](settings)
    method.start(Setup(BATCH, CLASSES, 4, BATCH, np.zeros(BATCH, int), 0, torch.device("cpu"), None))
    if isinstance(method, ForwardCorrection):
        method.transition.copy_(TRANSITION)
    method.begin_epoch(1)
    return method


def batch(weight: Tensor | None = None) -> Batch:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(BATCH, CLASSES, generator=generator) * 3
    labels = torch.randint(CLASSES, (BATCH,), generator=generator)
    return Batch(images, labels, torch.arange(BATCH), torch.ones(BATCH) if weight is None else weight)


def test_every_loss_method_has_a_case() -> None:
    covered = {settings.name for settings, _ in CASES.values()}
    assert covered >= {name for name, method in METHODS.items() if issubclass(method, LossMethod)}


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_those_of_the_formula(case: str) -> None:
    settings, formula = CASES[case]
    weight = torch.linspace(0, 2, BATCH)
    samples = batch(weight)
    logits = samples.images.clone().requires_grad_()
    output = make(settings).step(lambda _: logits, samples)
    output.loss.backward()
    oracle = samples.images.double().requires_grad_()
    expected = (formula(oracle, samples.labels) * weight.double()).sum()
    expected.backward()
    assert logits.grad is not None
    assert oracle.grad is not None
    torch.testing.assert_close(output.loss.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logits.grad.double(), oracle.grad, rtol=1e-4, atol=1e-6)
    assert output.finite.all()
    assert output.logits is logits


@pytest.mark.parametrize("case", CASES)
def test_a_sample_that_is_not_finite_or_has_weight_zero_adds_nothing(case: str) -> None:
    settings, _ = CASES[case]
    weight = torch.ones(BATCH)
    weight[3] = 0
    samples = batch(weight)
    clean = samples.images.clone()
    broken = samples.images.clone()
    broken[7, 2], broken[9] = math.nan, math.inf
    logits = broken.requires_grad_()
    output = make(settings).step(lambda _: logits, samples)
    output.loss.backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    assert not logits.grad[[3, 7, 9]].any()
    assert (~output.finite).nonzero().flatten().tolist() == [7, 9]
    kept = torch.ones(BATCH)
    kept[[3, 7, 9]] = 0
    alone = make(settings).step(lambda _: clean, batch(kept))
    torch.testing.assert_close(output.loss, alone.loss)


@pytest.mark.parametrize("case", CASES)
def test_extreme_logits_have_finite_losses_and_gradients(case: str) -> None:
    settings, _ = CASES[case]
    samples = batch()
    logits = torch.zeros(BATCH, CLASSES)
    logits[torch.arange(BATCH), samples.labels] = -200.0  # p_y underflows
    logits.requires_grad_()
    output = make(settings).step(lambda _: logits, samples)
    output.loss.backward()
    assert math.isfinite(float(output.loss.detach()))
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
