"""MixUp as a method: what is mixed, and its loss, read off the images that reach the network."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sopdist.methods.mixup import MixUpSettings
from tests.support.method_driver import Driver, Taken, parts_of_mixed

SAMPLES, CLASSES = 6, 3
LABELS = [0, 1, 2, 0, 1, 2]


def mixed_pairs(taken: Taken) -> list[tuple[int, int, float]]:
    """Of every mixed image: the sample itself, its partner, and the share of the sample."""
    pairs = []
    for own, parts in enumerate(parts_of_mixed(taken.inputs[0][0])):
        (partner,) = (parts.keys() - {own}) or {own}
        pairs.append((own, partner, parts[own]))
    return pairs


def test_loss_and_gradient_are_those_of_the_formula() -> None:
    """share CE(p, y_i) + (1 - share) CE(p, y_j), one sample at a time in float64."""
    driver = Driver(MixUpSettings(), LABELS, CLASSES)
    driver.begin(0)
    for _ in range(3):
        taken = driver.step(driver.batch(range(SAMPLES)), lr=0.5)
        logits = taken.outputs[0].detach().double().requires_grad_()
        expected = torch.zeros((), dtype=torch.float64)
        for own, partner, share in mixed_pairs(taken):
            log_p = logits[own] - logits[own].exp().sum().log()
            expected = expected - share * log_p[LABELS[own]] - (1 - share) * log_p[LABELS[partner]]
        expected.backward()
        assert taken.loss == pytest.approx(float(expected.detach()), rel=1e-5)
        assert taken.outputs[0].grad is not None
        assert logits.grad is not None
        torch.testing.assert_close(taken.outputs[0].grad.double(), logits.grad, rtol=1e-4, atol=1e-6)


def test_each_sample_is_a_partner_once_and_all_have_one_share_that_changes_with_the_step() -> None:
    driver = Driver(MixUpSettings(), LABELS, CLASSES)
    driver.begin(0)
    shares = []
    for _ in range(200):
        pairs = mixed_pairs(driver.step(driver.batch(range(SAMPLES))))
        assert sorted(partner for _, partner, _ in pairs) == list(range(SAMPLES))
        found = [share for own, partner, share in pairs if own != partner]
        assert max(found) == min(found)
        shares.append(found[0])
    assert np.mean(shares) == pytest.approx(0.5, abs=0.07), "also below one half, as published"
    assert np.quantile(shares, 0.1) == pytest.approx(0.1, abs=0.07), "uniform for alpha = 1"
    assert len(set(shares)) == len(shares)


def test_pairs_with_a_sample_that_cannot_be_used_do_not_count() -> None:
    driver = Driver(MixUpSettings(), LABELS, CLASSES)
    driver.begin(0)
    driver.nonfinite = {2: torch.nan}
    taken = driver.step(driver.batch(range(SAMPLES), weight=[1, 0, 1, 1, 1, 1]))
    bad = [own for own, partner, _ in mixed_pairs(taken) if {own, partner} & {1, 2}]
    assert taken.outputs[0].grad is not None
    assert not taken.outputs[0].grad[bad].any()
    assert taken.outputs[0].grad[[own for own in range(SAMPLES) if own not in bad]].any(1).all()
