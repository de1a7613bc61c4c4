"""CORES2 and CORES2*: losses, sieve, class shares and the second stage against float64, one sample at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from sopdist.methods.cores2 import CORES2, CORES2Settings, cores2_losses
from sopdist.methods.cores2_star import CORES2Star, CORES2StarSettings
from tests.support.method_driver import Driver, softmax

SAMPLES, CLASSES = 8, 3
LABELS = [0, 0, 0, 0, 1, 1, 2, 2]


def loss_of(logits: Tensor, label: int, shares: list[float], beta: float) -> Tensor:
    """CE(y) - beta sum_k r_k CE(k), in float64, for autograd."""
    ce = -(logits.exp() / logits.exp().sum() + 1e-8).log()
    return ce[label] - beta * sum(share * ce[class_] for class_, share in enumerate(shares))


def score_of(logits: np.ndarray, label: int) -> float:
    ce = [-math.log(p + 1e-8) for p in softmax(logits)]
    return ce[label] - sum(ce) / len(ce)


def draw_logits(seed: int, samples: int = SAMPLES) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(samples, CLASSES)) * 2


@pytest.mark.parametrize("beta", [0.0, 0.7, 2.0])
def test_losses_scores_and_gradients_are_those_of_the_formula(beta: float) -> None:
    z, shares = draw_logits(0), [0.5, 0.3, 0.2]
    z[3] = [40.0, 0.0, -40.0]  # probabilities underflow next to 1e-8
    found = torch.tensor(z, dtype=torch.float32, requires_grad=True)
    losses, scores = cores2_losses(found, torch.tensor(LABELS), torch.tensor(shares), beta)
    losses.sum().backward()
    exact = torch.from_numpy(z).requires_grad_()
    expected = torch.stack([loss_of(row, label, shares, beta) for row, label in zip(exact, LABELS, strict=True)])
    expected.sum().backward()
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5)
    assert found.grad is not None
    assert exact.grad is not None
    torch.testing.assert_close(found.grad.double(), exact.grad, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(scores, [score_of(row, y) for row, y in zip(z, LABELS, strict=True)], atol=1e-5)
    assert not scores.requires_grad


def begun(**settings: float | int | bool | None) -> tuple[Driver, CORES2]:
    given = {"warmup": 0, "ramp_end": 2, "sieve_from": 2} | settings
    driver = Driver(CORES2Settings(**given), LABELS, CLASSES)
    assert isinstance(driver.method, CORES2)
    return driver, driver.method


def test_the_loss_of_a_batch_is_the_mean_over_the_samples_that_the_sieve_keeps() -> None:
    """From epoch 2 on; before, over all. Class shares follow what was left out in the epoch before."""
    driver, _ = begun(strength=1.5)
    shares = [4 / 8, 2 / 8, 2 / 8]
    for epoch, beta in enumerate([0.0, 0.75, 1.5, 1.5, 1.5]):
        z = draw_logits(epoch)
        driver.begin(epoch)
        driver.set_logits(z)
        left = [4, 2, 2]
        for samples in ([0, 2, 4, 6], [1, 3, 5, 7]):
            taken = driver.step(driver.batch(samples))
            kept = [i for i in samples if epoch < 2 or score_of(z[i], LABELS[i]) <= 0]
            for sample in set(samples) - set(kept):
                left[LABELS[sample]] -= 1
            exact = torch.from_numpy(z).requires_grad_()
            expected = torch.stack([loss_of(exact[i], LABELS[i], shares, beta) for i in kept]).mean()
            expected.backward()
            assert taken.loss / len(samples) == pytest.approx(float(expected.detach()), rel=1e-4, abs=1e-5)
            assert taken.outputs[0].grad is not None
            assert exact.grad is not None
            gradient = taken.outputs[0].grad.double() / len(samples)
            torch.testing.assert_close(gradient, exact.grad[samples], rtol=1e-4, atol=1e-5)
        shares = [count / sum(left) for count in left]
    assert left != [4, 2, 2], "the sieve left something out"


def test_a_batch_of_which_the_sieve_keeps_nothing_teaches_nothing() -> None:
    driver, method = begun(sieve_from=0)
    driver.begin(0)
    driver.set_logits([-5 * np.eye(CLASSES)[label] for label in LABELS])
    taken = driver.step(driver.batch(range(SAMPLES)))
    assert taken.loss == 0
    assert taken.outputs[0].grad is not None
    assert not taken.outputs[0].grad.any()
    driver.begin(1)
    assert method.shares.tolist() == [0.5, 0.25, 0.25], "and the shares stay as they are"
    found = method.readout(torch.tensor(LABELS))
    assert found.flags.all()


def test_the_published_schedule() -> None:
    """Of 100 epochs: beta 0 until epoch 10, 2 from epoch 40; the rate is divided by 1 + beta."""
    method = Driver(CORES2Settings(), LABELS, CLASSES, epochs=100).method
    assert isinstance(method, CORES2)
    expected = [2 * min(max((epoch - 10) / 30, 0), 1) for epoch in range(100)]
    assert [method.beta(epoch) for epoch in range(100)] == pytest.approx(expected)
    assert [method.lr_factor(epoch) for epoch in range(100)] == pytest.approx([1 / (1 + beta) for beta in expected])
    unchanged = Driver(CORES2Settings(divide_lr=False), LABELS, CLASSES, epochs=100).method
    assert {unchanged.lr_factor(epoch) for epoch in range(100)} == {1.0}


def test_a_label_is_flagged_if_its_score_is_positive() -> None:
    driver, method = begun()
    driver.begin(0)
    for seed in range(2):
        z = draw_logits(seed)
        driver.set_logits(z)
        driver.step(driver.batch([0, 1, 2, 3, 4, 5, 6], weight=[1, 1, 1, 1, 1, 1, 0]))
    found = method.readout(torch.tensor(LABELS))
    scores = [score_of(z[i], LABELS[i]) for i in range(6)]
    np.testing.assert_allclose(found.scores[:6], scores, rtol=1e-5)
    assert found.flags.tolist() == [score > 0 for score in scores] + [False, False]
    predicted = z.argmax(1)
    assert found.proposed.tolist() == [predicted[i] if found.flags[i] else LABELS[i] for i in range(SAMPLES)]
    assert found.visited.tolist() == [True] * 6 + [False] * 2


# -- CORES2* -----------------------------------------------------------------------------------------------------------


def star(batch: int = 6, **settings: float | int | None) -> tuple[Driver, CORES2Star]:
    given = {"sieve_epochs": 2, "consistency": 0.6, "unlabelled": 1 / 3} | settings
    driver = Driver(CORES2StarSettings(**given), LABELS, CLASSES, epochs=6, batch=batch)
    assert isinstance(driver.method, CORES2Star)
    return driver, driver.method


def test_the_scores_of_the_last_visits_divide_the_samples_for_good() -> None:
    driver, method = star()
    z = draw_logits(5)
    for epoch in range(2):
        (part,) = driver.begin(epoch)
        assert part.samples is None
        driver.set_logits(draw_logits(epoch) if epoch == 0 else z)
        driver.step(driver.batch([0, 1, 2, 3, 4, 5, 6]))  # 7 is never visited
    kept = [i for i in range(7) if score_of(z[i], LABELS[i]) <= 0]
    left_out = [i for i in range(SAMPLES) if i not in kept]
    assert 0 < len(kept) < 7
    for epoch in range(2, 6):
        parts = driver.begin(epoch)
        assert driver.trainer.restarts == 1, "a new network, once"
        assert [part.samples.tolist() for part in parts if part.samples is not None] == [kept, left_out]
        assert [part.columns for part in parts] == [4, 2]
        assert method.lr_factor(epoch) == 1
        driver.step(driver.batch_of_parts(parts))
    assert method.stages(6) == (2, 4)


def test_the_second_stage_is_cross_entropy_on_kept_and_consistency_on_the_other_samples() -> None:
    """CE(p(strong), y) + consistency KL(p(weak) || p(strong)), means over their samples; p(weak) has no gradient."""
    driver, _ = star()
    for epoch in range(2):
        driver.begin(epoch)
        driver.set_logits(draw_logits(5))
        driver.step(driver.batch(range(SAMPLES)))
    driver.begin(2)
    logits = np.random.default_rng(7).normal(size=(SAMPLES, 2, CLASSES)) * 2  # (samples, weak and strong, K)
    driver.set_logits(logits)
    samples, part, weight = [0, 4, 1, 6, 2, 5], [0, 0, 1, 1, 0, 1], [1.0, 1, 1, 1, 0, 1]
    taken = driver.step(driver.batch(samples, weight, part))
    strong = torch.from_numpy(logits[samples, 1]).requires_grad_()
    weak = softmax(logits[samples, 0])
    on_kept, on_others = [], []
    for row, (z, sample) in enumerate(zip(strong, samples, strict=True)):
        log_p = z - z.exp().sum().log()
        if part[row] == 0 and weight[row]:
            on_kept.append(-log_p[LABELS[sample]])
        elif weight[row]:
            on_others.append(sum(p * (math.log(p) - log_p[k]) for k, p in enumerate(weak[row])))
    expected = sum(on_kept) / 2 + 0.6 * sum(on_others) / 3
    assert isinstance(expected, Tensor)
    expected.backward()
    assert taken.loss / sum(weight) == pytest.approx(float(expected.detach()), rel=1e-5)
    assert taken.outputs[0].grad is not None
    assert strong.grad is not None
    by_weak, by_strong = taken.outputs[0].grad.double().tensor_split(2)
    assert not by_weak.any()
    torch.testing.assert_close(by_strong / sum(weight), strong.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("sign", [1, -1], ids=["keeps everything", "keeps nothing"])
def test_a_sieve_that_does_not_divide_leaves_all_samples_labelled(sign: int) -> None:
    driver, _ = star()
    for epoch in range(2):
        driver.begin(epoch)
        driver.set_logits([5 * sign * np.eye(CLASSES)[label] for label in LABELS])
        driver.step(driver.batch(range(SAMPLES)))
    parts = driver.begin(2)
    assert [part.samples for part in parts] == [None]
    z = draw_logits(3)
    driver.set_logits(z)
    taken = driver.step(driver.batch(range(SAMPLES)))
    expected = -np.mean([math.log(softmax(row)[label]) for row, label in zip(z, LABELS, strict=True)])
    assert taken.loss / SAMPLES == pytest.approx(float(expected), rel=1e-5)
