"""DivideMix: the warm-up, the division, and a step of both networks against float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sopdist.methods.dividemix import DivideMixSettings
from tests.support.dividemix_steps import (
    BATCH,
    CLASSES,
    LABELS,
    SAMPLES,
    distinct_batch,
    divided,
    draw_logits,
    items_of,
    losses_of,
    make,
    method_of,
    set_both,
    take_step,
)
from tests.support.method_driver import Driver, softmax
from tests.support.two_normals import rescaled, small_posterior

# -- warm-up -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("penalty", [False, True])
def test_the_warm_up_is_cross_entropy_with_or_without_the_confidence_penalty(penalty: bool) -> None:
    """CE + sum_k p_k log p_k of both networks."""
    driver = make(penalty=penalty)
    (part,) = driver.begin(1)
    assert part.samples is None
    taken = driver.step(driver.batch(range(SAMPLES)))
    logits = taken.outputs[0].detach().double().requires_grad_()
    expected = torch.zeros((), dtype=torch.float64)
    for row, label in zip(logits, LABELS * 2, strict=True):
        p = row.exp() / row.exp().sum()
        expected = expected - p[label].log() + penalty * (p * p.log()).sum()
    expected.backward()
    assert taken.loss == pytest.approx(float(expected.detach()), rel=1e-5)
    assert taken.outputs[0].grad is not None
    assert logits.grad is not None
    torch.testing.assert_close(taken.outputs[0].grad.double(), logits.grad, rtol=1e-4, atol=1e-6)


# -- division ----------------------------------------------------------------------------------------------------------


def test_each_network_divides_the_samples_for_the_other() -> None:
    driver = make()
    first, second = draw_logits(0, wrong=[0, 1, 2]), draw_logits(1, wrong=[0, 5, 6, 7])
    set_both(driver, first, second)
    parts = driver.begin(2)
    found = driver.table("division")
    w = np.stack([small_posterior(rescaled(losses_of(z))) for z in (first, second)], axis=1)
    np.testing.assert_allclose(found["clean"], w, atol=1e-3)
    together = softmax(first + second).argmax(1)
    assert found["predicted"].tolist() == together.tolist()
    by_second = [[3, 4, 5, 6, 7, 8, 9, 10, 11], [0, 1, 2]]  # the first network divides for the second
    by_first = [[1, 2, 3, 4, 8, 9, 10, 11], [0, 5, 6, 7]]
    assert [part.samples.tolist() for part in parts if part.samples is not None] == by_second + by_first
    assert [part.columns for part in parts] == [BATCH // 2] * 4
    read = driver.method.readout(torch.tensor(LABELS))
    assert read is not None
    np.testing.assert_allclose(read.scores, 1 - w.mean(1), atol=1e-3)
    assert read.flags.tolist() == (w.mean(1) < 0.5).tolist()
    assert read.proposed.tolist() == np.where(w.mean(1) < 0.5, together, LABELS).tolist()


def test_a_label_is_flagged_if_the_mean_of_both_probabilities_is_below_one_half() -> None:
    driver = make()
    mean = divided(driver, seed=3).mean(1)
    assert ((mean > 0.3) & (mean < 0.5)).any()
    read = driver.method.readout(torch.tensor(LABELS))
    assert read is not None
    assert read.flags.tolist() == (mean < 0.5).tolist()
    np.testing.assert_allclose(read.scores, 1 - mean, atol=1.1e-3)
    loss = driver.table("division")["losses"][:, 0].mean(1).numpy()  # orders samples with the same probability
    np.testing.assert_allclose(read.scores, 0.999 * (1 - mean) + 0.001 * loss, atol=1e-6)


def test_the_losses_of_the_last_epochs_are_averaged_after_each_was_scaled() -> None:
    """As published: l <- (l - min) / (max - min) in every epoch, then the mean of the last ones."""
    driver = make(history=2)
    scaled_losses = []
    for epoch, factor in ((2, 1.0), (3, 4.0), (4, 0.5)):
        logits = factor * draw_logits(epoch, wrong=[epoch, epoch + 3, epoch + 4])
        set_both(driver, logits, logits)
        driver.begin(epoch)
        scaled_losses.append(rescaled(losses_of(logits)))
        w = small_posterior(rescaled(np.mean(scaled_losses[-2:], axis=0)))
        np.testing.assert_allclose(driver.table("division")["clean"], np.stack([w, w], axis=1), atol=1e-3)


def test_during_the_warm_up_nothing_is_divided_or_reported() -> None:
    driver = make(warmup=3)
    for epoch in range(3):
        assert [part.samples for part in driver.begin(epoch)] == [None]
    assert driver.method.readout(torch.tensor(LABELS)) is None
    assert torch.isnan(driver.table("division")["clean"]).all()


def test_samples_that_cannot_be_read_or_have_no_label_take_no_part() -> None:
    driver = make(labels=[-1, *LABELS[1:]])
    driver.trainer.unreadable = {4}
    logits = draw_logits(0, wrong=[1, 2, 3])
    set_both(driver, logits, logits)
    parts = driver.begin(2)
    found = np.concatenate([part.samples for part in parts if part.samples is not None])
    assert set(found.tolist()) == set(range(SAMPLES)) - {0, 4}
    read = driver.method.readout(torch.tensor(LABELS))
    assert read is not None
    assert (~read.visited).nonzero()[0].tolist() == [0, 4]


# -- steps -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [0.5, 0.7])
@pytest.mark.parametrize("seed", range(3))
def test_losses_and_gradients_of_a_step_are_those_of_the_formulas(seed: int, threshold: float) -> None:
    """The weight of the unlabelled rises from 0 with the steps after the warm-up."""
    driver = make(unlabelled_weight=5.0, temperature=0.4, mixup_alpha=0.8, threshold=threshold)
    clean = divided(driver, seed=seed)
    set_both(driver, *np.random.default_rng(seed).normal(size=(2, SAMPLES, 2, CLASSES)) * 1.5)  # (samples, views, K)
    batch = distinct_batch(driver, 3)
    steps = math.ceil(len(method_of(driver).parts(2)[0].samples) / (BATCH // 2))
    for step in range(steps):
        taken, oracle, own = take_step(driver, clean, batch, lr=0.02)
        logits = taken.outputs[-1].detach().double().requires_grad_()
        halves = logits.split([2 * len(samples) for samples in own])
        weight = 5.0 * (step / steps) / 4.0
        losses = [oracle.loss(n, halves[n], items_of(taken, n, own[n]), weight) for n in range(2)]
        expected = torch.stack(losses).sum()
        expected.backward()
        assert taken.loss / len(batch) == pytest.approx(float(expected.detach()), rel=1e-4)
        assert taken.outputs[-1].grad is not None
        assert logits.grad is not None
        torch.testing.assert_close(taken.outputs[-1].grad.double() / len(batch), logits.grad, rtol=1e-3, atol=1e-5)


def test_images_are_mixed_within_each_network_with_one_share_of_at_least_one_half() -> None:
    driver = make(unlabelled_weight=5.0)
    clean = divided(driver)
    batch = distinct_batch(driver, 3)
    for _ in range(20):
        taken, _, own = take_step(driver, clean, batch)
        shares = []
        for network in range(2):
            items = items_of(taken, network, own[network])
            partners = [next(iter(parts.keys() - {feature}), feature) for feature, parts in items]
            assert sorted(partners) == sorted(feature for feature, _ in items), "each view is a partner once"
            found = {parts[feature] for feature, parts in items if len(parts) == 2}
            assert max(found) - min(found) < 1e-6
            assert 0.5 <= min(found) <= 1
            shares.append(min(found))
        assert shares[0] != shares[1]


def test_without_a_weight_for_the_unlabelled_they_are_only_partners() -> None:
    """Only labelled images reach the networks, also in the mean prediction, and nothing is learned from squares."""
    driver = make(unlabelled_weight=0.0)
    clean = divided(driver)
    set_both(driver, *np.random.default_rng(5).normal(size=(2, SAMPLES, 2, CLASSES)))
    batch = distinct_batch(driver, 3)
    mixed_in = set()
    for _ in range(5):
        taken, oracle, own = take_step(driver, clean, batch)
        labelled = [[i for i in own[n] if oracle.is_labelled(n, i)] for n in range(2)]
        logits = taken.outputs[-1].detach().double()
        halves = logits.split([2 * len(samples) for samples in labelled])
        items = [items_of(taken, n, labelled[n]) for n in range(2)]
        expected = sum(float(oracle.loss(n, halves[n], items[n], 0.0)) for n in range(2))
        assert taken.loss / len(batch) == pytest.approx(expected, rel=1e-4)
        mixed_in |= {at % SAMPLES for _, parts in items[0] for at in parts}
    assert mixed_in - set(labelled[0]), "unlabelled partners"


@pytest.mark.parametrize(("epoch", "share"), [(2, 0.0), (4, 0.5), (6, 1.0), (9, 1.0)])
def test_the_weight_of_the_unlabelled_rises_to_its_full_value(epoch: int, share: float) -> None:
    driver = make(unlabelled_weight=30.0, ramp=4.0)
    clean = divided(driver, epoch)
    taken, oracle, own = take_step(driver, clean, distinct_batch(driver, 3))
    logits = taken.outputs[-1].detach().double()
    halves = logits.split([2 * len(samples) for samples in own])
    expected = sum(float(oracle.loss(n, halves[n], items_of(taken, n, own[n]), 30.0 * share)) for n in range(2))
    assert taken.loss / len(taken.output.finite) == pytest.approx(expected, rel=1e-4)


def test_targets_are_predicted_in_evaluation_mode_and_have_no_gradient() -> None:
    class Noisy(nn.Module):
        """Shifts its input in training mode."""

        def forward(self, images: Tensor) -> Tensor:
            return images.flatten(1) + (100.0 if self.training else 0.0)

    def backbone(features: int, classes: int) -> nn.Module:
        return nn.Sequential(Noisy(), nn.Linear(features, classes))

    driver = Driver(DivideMixSettings(warmup=2), LABELS, CLASSES, batch=BATCH, backbone=backbone)
    divided(driver)
    taken = driver.step(distinct_batch(driver, 3))
    guesses = taken.outputs[0]
    assert not guesses.requires_grad
    assert float(guesses.abs().max()) < 5
    assert driver.network.training
