"""Truncated GCE: which samples are left out, when, and by which network."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from sopdist.methods.gce import GCE, GCESettings, gce_losses
from tests.support.method_driver import Driver, softmax

SAMPLES, CLASSES, K = 20, 3, 0.5
LABELS = [index % CLASSES for index in range(SAMPLES)]


def begun(**settings: float | int | None) -> Driver:
    given = {"truncate": K, "prune_from": 2, "prune_every": 3, "holdout": 0.25} | settings
    return Driver(GCESettings(**given), LABELS, CLASSES, epochs=12)


def logits_with(right: set[int], strength: float = 2.0) -> np.ndarray:
    """p_y is large for the samples in `right`, and small for the others."""
    signs = [1 if index in right else -1 for index in range(SAMPLES)]
    return np.array([sign * strength * np.eye(CLASSES)[label] for sign, label in zip(signs, LABELS, strict=True)])


def kept_in(driver: Driver, epoch: int) -> set[int]:
    (part,) = driver.begin(epoch)
    assert part.samples is not None
    return set(part.samples.tolist())


def held_out_of(driver: Driver) -> set[int]:
    assert isinstance(driver.method, GCE)
    assert driver.method.holdout is not None
    return set(driver.method.holdout.samples.tolist())


def test_samples_are_left_out_where_p_y_is_at_most_the_limit() -> None:
    driver = begun()
    held_out, logits = held_out_of(driver), np.random.default_rng(3).normal(size=(SAMPLES, CLASSES)) * 2
    driver.set_logits(logits)
    assert kept_in(driver, 0) == kept_in(driver, 1) == set(range(SAMPLES)) - held_out
    p_y = softmax(logits)[np.arange(SAMPLES), LABELS]
    assert kept_in(driver, 2) == {index for index in range(SAMPLES) if p_y[index] > K} - held_out


def test_the_truncated_loss_has_the_gradient_of_the_plain_one_on_the_samples_kept() -> None:
    """Lq(max(p_y, k)) of all samples, in float64."""
    logits = torch.from_numpy(np.random.default_rng(1).normal(size=(SAMPLES, CLASSES)) * 2)
    labels = torch.tensor(LABELS)
    wanted = logits.clone().requires_grad_()
    p_y = wanted.softmax(1).gather(1, labels[:, None])[:, 0]
    ((1 - p_y.clamp(min=K) ** 0.7) / 0.7).sum().backward()
    kept = (p_y > K).nonzero()[:, 0]
    found = logits.float().requires_grad_()
    gce_losses(found[kept], labels[kept]).sum().backward()
    assert found.grad is not None
    assert wanted.grad is not None
    torch.testing.assert_close(found.grad.double(), wanted.grad, rtol=1e-4, atol=1e-6)


def test_decisions_are_made_from_prune_from_on_every_few_epochs() -> None:
    driver = begun(prune_from=2, prune_every=3)
    others = set(range(SAMPLES)) - held_out_of(driver)
    states = {}
    for epoch in range(9):
        right = set(range(epoch, SAMPLES))  # more samples are wrong in every epoch, and the holdout gets no worse
        logits = logits_with(right | held_out_of(driver))
        driver.set_logits(logits * (1 + epoch))
        states[epoch] = kept_in(driver, epoch)
    decided = {0: 0, 1: 0, 2: 2, 3: 2, 4: 2, 5: 5, 6: 5, 7: 5, 8: 8}
    assert states == {epoch: others & set(range(at, SAMPLES)) for epoch, at in decided.items()}


def test_the_network_that_was_best_on_the_holdout_decides_and_training_continues_with_its_own() -> None:
    driver = begun()
    held_out = held_out_of(driver)
    best, current = logits_with(held_out | set(range(10))), logits_with(set(range(SAMPLES)) - held_out)
    driver.begin(0)
    driver.set_logits(best)
    driver.begin(1)
    driver.set_logits(current)
    before = driver.trainer.weights()
    assert kept_in(driver, 2) == set(range(10)) - held_out
    after = driver.trainer.weights()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_labels_that_are_left_out_are_flagged_with_the_predicted_class() -> None:
    driver = begun()
    logits = np.random.default_rng(3).normal(size=(SAMPLES, CLASSES)) * 2
    driver.set_logits(logits)
    for epoch in range(3):
        driver.begin(epoch)
    found = driver.method.readout(torch.tensor(LABELS))
    assert found is not None
    p = softmax(logits)
    p_y = p[np.arange(SAMPLES), LABELS]
    assert found.flags.tolist() == (p_y <= K).tolist()
    np.testing.assert_allclose(found.scores, 1 - p_y, atol=1e-5)
    assert found.proposed.tolist() == np.where(p_y <= K, p.argmax(1), LABELS).tolist()
    assert found.visited.all()


def test_a_label_at_the_limit_itself_is_left_out_and_flagged() -> None:
    """Two classes and a network that has learned nothing: p_y = 1/2 for all."""
    driver = Driver(GCESettings(truncate=0.5, prune_from=1, holdout=0.25), [0, 1] * 4, 2)
    driver.set_logits(np.repeat([[5.0, 0.0], [0.0, 0.0]], 4, axis=0))
    driver.begin(0)
    left_out = set(range(8)) - kept_in(driver, 1) - held_out_of(driver)
    assert left_out
    found = driver.method.readout(torch.tensor([0, 1] * 4))
    assert found is not None
    assert all(found.flags[index] for index in left_out)


def test_if_nothing_were_left_all_samples_but_the_holdout_are_kept() -> None:
    driver = begun(prune_from=1)
    driver.set_logits(logits_with(set()))
    driver.begin(0)
    assert kept_in(driver, 1) == set(range(SAMPLES)) - held_out_of(driver)


def test_samples_that_cannot_be_read_keep_their_verdict() -> None:
    driver = begun(prune_from=1, prune_every=1)
    driver.trainer.unreadable = {4}
    driver.set_logits(logits_with(set(range(10))))
    driver.begin(0)
    driver.begin(1)
    table = driver.table("pruned")
    assert (int(table["visits"][4]), float(table["score"][4])) == (0, 0.0)
    found = driver.method.readout(torch.tensor(LABELS))
    assert found is not None
    assert found.scores[4] == -math.inf
    assert not found.flags[4]


def test_without_truncation_there_is_no_holdout_and_no_table() -> None:
    driver = begun(truncate=0.0)
    (part,) = driver.begin(5)
    assert part.samples is None
    assert driver.method.tables() == {}
    assert driver.method.readout(torch.tensor(LABELS)) is None


@pytest.mark.parametrize("q", [0.01, 0.7, 1.0])
def test_the_loss_lies_between_cross_entropy_and_the_mean_absolute_error(q: float) -> None:
    logits, labels = torch.randn(50, 4, generator=torch.Generator().manual_seed(0)) * 3, torch.arange(50) % 4
    p_y = logits.double().softmax(1).gather(1, labels[:, None])[:, 0]
    found = gce_losses(logits, labels, q).double()
    assert (found <= -p_y.log() + 1e-5).all()
    assert (found >= 1 - p_y - 1e-5).all()
