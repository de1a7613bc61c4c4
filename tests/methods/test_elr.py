"""ELR: targets, loss and gradient against float64, one sample at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from sopdist.methods.elr import ELR, ELRSettings, Layout
from tests.support.method_driver import Driver, softmax

SAMPLES, CLASSES = 7, 4
LABELS = [0, 1, 2, 3, 0, 1, 2]


class ByHand:
    """t <- beta t + (1 - beta) p / sum(p), then CE + strength log(1 - <t, p>), with p clipped."""

    def __init__(self, strength: float, beta: float) -> None:
        self.strength, self.beta = strength, beta
        self.targets = [[0.0] * CLASSES for _ in range(SAMPLES)]

    def visit(self, sample: int, logits: list[float]) -> None:
        seen = [min(max(p, 1e-4), 1 - 1e-4) for p in softmax(logits)]
        old = self.targets[sample]
        self.targets[sample] = [self.beta * t + (1 - self.beta) * p / sum(seen) for t, p in zip(old, seen, strict=True)]

    def loss(self, sample: int, logits: Tensor) -> Tensor:
        """In float64, for autograd."""
        p = logits.exp() / logits.exp().sum()
        clipped = torch.minimum(torch.maximum(p, torch.tensor(1e-4)), torch.tensor(1 - 1e-4))
        inner = (torch.tensor(self.targets[sample], dtype=torch.float64) * clipped).sum()
        return -p[LABELS[sample]].log() + self.strength * (1 - inner).log()


def draw_logits(seed: int) -> np.ndarray:
    """Some of them so large that probabilities are clipped at both ends."""
    z = np.random.default_rng(seed).normal(size=(SAMPLES, CLASSES)) * 2
    z[1] *= 6
    z[5, 2] = 15
    return z


@pytest.mark.parametrize(("strength", "beta"), [(3.0, 0.7), (7.0, 0.9), (1.0, 0.0)])
def test_targets_losses_and_gradients_are_those_of_the_formula(strength: float, beta: float) -> None:
    driver = Driver(ELRSettings(strength=strength, beta=beta), LABELS, CLASSES)
    driver.begin(0)
    oracle = ByHand(strength, beta)
    for epoch in range(6):
        z = draw_logits(epoch)
        assert (softmax(z) < 1e-4).any()
        assert (softmax(z) > 1 - 1e-4).any()
        driver.set_logits(z)
        for samples in ([6, 0, 3], [1, 5, 2, 4]):
            taken = driver.step(driver.batch(samples))
            for sample in samples:
                oracle.visit(sample, z[sample].tolist())
            exact = torch.from_numpy(z[samples]).requires_grad_()
            expected = sum(oracle.loss(sample, row) for sample, row in zip(samples, exact, strict=True))
            assert isinstance(expected, Tensor)
            expected.backward()
            assert taken.loss == pytest.approx(float(expected.detach()), rel=2e-4)
            assert taken.outputs[0].grad is not None
            assert exact.grad is not None
            torch.testing.assert_close(taken.outputs[0].grad.double(), exact.grad, rtol=2e-3, atol=2e-4)
    found = driver.table("target")
    np.testing.assert_allclose(found["target"][:, 0], oracle.targets, rtol=1e-5, atol=1e-7)
    assert found["visits"].tolist() == [6] * SAMPLES


def test_a_target_is_updated_before_it_is_used() -> None:
    """At the first visit it is (1 - beta) p already."""
    driver = Driver(ELRSettings(strength=2.0, beta=0.6), [0], 2)
    driver.begin(0)
    driver.set_logits([[math.log(3.0), 0.0]])  # p = (3/4, 1/4)
    expected = -math.log(0.75) + 2 * math.log(1 - 0.4 * (0.75**2 + 0.25**2))
    assert driver.step(driver.batch([0])).loss == pytest.approx(expected, rel=1e-6)


def test_the_loss_for_ones_own_loop_is_the_mean_of_the_same() -> None:
    elr, oracle = ELR(SAMPLES, CLASSES, strength=3.0, beta=0.7), ByHand(3.0, 0.7)
    samples = [4, 1, 6]
    for epoch in range(4):
        z = draw_logits(epoch)
        for sample in samples:
            oracle.visit(sample, z[sample].tolist())
        found = elr(torch.tensor(z[samples]).float(), torch.tensor([LABELS[i] for i in samples]), torch.tensor(samples))
        expected = sum(float(oracle.loss(i, torch.from_numpy(z[i]))) for i in samples) / len(samples)
        assert float(found) == pytest.approx(expected, rel=2e-4)
    best = np.argmax(oracle.targets, axis=1)
    read = elr.readout(torch.tensor(LABELS))
    visited = [i in samples for i in range(SAMPLES)]
    assert read.visited.tolist() == visited
    assert read.flags.tolist() == [seen and best[i] != LABELS[i] for i, seen in enumerate(visited)]


@pytest.mark.parametrize("beta", [0.7, 0.9])
def test_compact_targets_stay_within_the_stated_error(beta: float) -> None:
    targets: dict[Layout, Tensor] = {}
    layouts: tuple[Layout, ...] = ("float32", "float16")
    for layout in layouts:
        elr = ELR(SAMPLES, CLASSES, beta=beta, layout=layout)
        for epoch in range(60):
            elr(torch.tensor(draw_logits(epoch)).float(), torch.tensor(LABELS), torch.arange(SAMPLES))
        assert elr.table.target.element_size() == {"float32": 4, "float16": 2}[layout]
        targets[layout] = elr.table.target.float()
    error = float((targets["float16"] - targets["float32"]).abs().max())
    assert 0 < error <= 2**-12 / (1 - beta)


def test_a_label_is_flagged_if_another_entry_of_its_target_is_larger() -> None:
    driver = Driver(ELRSettings(), [0, 1, 2, 2, 0], 3)
    driver.begin(0)
    driver.set_logits([[2.0, 0, 0], [2.0, 0, 0], [0, 3.0, 1.0], [0, 0, 0], [9.0, 9.0, 9.0]])
    driver.step(driver.batch([0, 1, 2, 3], weight=[1, 1, 1, 1]))
    found = driver.method.readout(torch.tensor([0, 1, 2, 2, 0]))
    assert found is not None
    assert found.flags.tolist() == [False, True, True, False, False], "not if it is among the largest"
    assert found.proposed.tolist() == [0, 0, 1, 2, 0]
    assert found.scores[4] == -math.inf, "never visited"
    p = 0.3 * softmax([0, 3.0, 1.0])
    assert found.scores[2] == pytest.approx(p[1] - p[2], rel=1e-5)
