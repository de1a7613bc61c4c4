"""Forward correction: the estimate of the transition matrix, and the two stages of a run."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from sopdist.methods.forward import ForwardCorrection, ForwardSettings, estimate_transition, forward_losses
from tests.support.method_driver import Driver, softmax

CLASSES = 3


def by_hand(predicted: list[list[float]], percentile: float | None) -> list[list[float]]:
    """Row i: the sample with the largest p_i among those below the percentile, one sample at a time."""
    rows = []
    for class_ in range(len(predicted[0])):
        candidates = [row for row in predicted if not any(math.isnan(p) for p in row)]
        if percentile is not None:
            ascending = sorted(row[class_] for row in candidates)
            limit = ascending[math.ceil(percentile / 100 * (len(ascending) - 1))]
            candidates = [row for row in candidates if row[class_] < limit] or candidates
        best = candidates[0]
        for row in candidates:
            if row[class_] > best[class_]:
                best = row
        clipped = [max(p, 1e-7) for p in best]
        rows.append([p / sum(clipped) for p in clipped])
    return rows


tied = st.lists(st.integers(0, 4), min_size=CLASSES, max_size=CLASSES).filter(any)  # many equal probabilities


@given(st.lists(tied, min_size=1, max_size=40), st.sampled_from([None, 50.0, 97.0, 100.0]), st.data())
def test_row_i_is_the_prediction_for_the_anchor_of_class_i(
    weights: list[list[int]], percentile: float | None, data: st.DataObject
) -> None:
    predicted = np.array(weights) / np.sum(weights, axis=1, keepdims=True)
    unreadable = data.draw(st.sets(st.integers(0, len(weights) - 1), max_size=len(weights) - 1))
    predicted[list(unreadable)] = np.nan
    found = estimate_transition(predicted, percentile)
    np.testing.assert_allclose(found, by_hand(predicted.tolist(), percentile), rtol=1e-12)
    np.testing.assert_allclose(found.sum(1), 1, rtol=1e-12)


def test_without_any_readable_sample_the_matrix_cannot_be_estimated() -> None:
    with pytest.raises(ValueError, match="no training sample can be read"):
        estimate_transition(np.full((4, 3), np.nan), 97.0)


def test_an_error_that_cannot_happen_has_a_finite_loss() -> None:
    """T_iy = 0 for the only class that the network considers possible."""
    logits = torch.tensor([[60.0, 0.0, 0.0]], requires_grad=True)
    loss = forward_losses(logits, torch.tensor([1]), torch.eye(3)).sum()
    loss.backward()
    assert float(loss.detach()) == pytest.approx(-math.log(1e-7), rel=1e-4)
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


# -- a run -------------------------------------------------------------------------------------------------------------

SAMPLES = 20
LABELS = [index % CLASSES for index in range(SAMPLES)]


def begun(**settings: float | int | None) -> tuple[Driver, ForwardCorrection]:
    driver = Driver(ForwardSettings(first_epochs=3, holdout=0.25, **settings), LABELS, CLASSES, epochs=6)
    method = driver.method
    assert isinstance(method, ForwardCorrection)
    return driver, method


def random_logits(seed: int) -> NDArray[np.float64]:
    return np.random.default_rng(seed).normal(size=(SAMPLES, CLASSES)) * 2


def holdout_loss(logits: NDArray[np.float64], held_out: list[int]) -> float:
    return float(np.mean([-math.log(softmax(logits[i])[LABELS[i]]) for i in held_out]))


@pytest.mark.parametrize("percentile", [None, 60.0])
def test_the_network_that_was_best_on_the_holdout_estimates_the_matrix(percentile: float | None) -> None:
    driver, method = begun(percentile=percentile)
    (part,) = driver.begin(0)
    assert part.samples is not None
    held_out = sorted(set(range(SAMPLES)) - set(part.samples.tolist()))
    assert len(held_out) == 5
    seen = [random_logits(epoch) for epoch in range(3)]
    for epoch, logits in enumerate(seen, 1):  # the networks after 1, 2 and 3 epochs
        driver.set_logits(logits)
        if epoch == 3:
            driver.trainer.unreadable = {7, 11}
        driver.begin(epoch)
        assert driver.trainer.restarts == (epoch == 3)
    best = min(seen, key=lambda logits: holdout_loss(logits, held_out))
    assert best is not seen[2], "the last one would prove nothing"
    predicted = softmax(best)
    predicted[[7, 11]] = np.nan
    np.testing.assert_allclose(method.transition.numpy(), by_hand(predicted.tolist(), percentile), atol=1e-5)


def test_the_second_stage_is_a_fresh_network_on_all_samples_with_the_corrected_loss() -> None:
    driver, method = begun()
    assert method.stages(6) == (3, 3)
    for epoch in range(4):
        driver.set_logits(random_logits(epoch))
        (part,) = driver.begin(epoch)
    assert part.samples is None
    assert not method.holdout.best, "a checkpoint of the second stage does not carry it"
    after = random_logits(9)
    driver.set_logits(after)
    taken = driver.step(driver.batch(range(SAMPLES)))
    corrected = softmax(after) @ method.transition.numpy()
    expected = -sum(math.log(corrected[i, LABELS[i]]) for i in range(SAMPLES))
    assert taken.loss == pytest.approx(expected, rel=1e-5)


def test_the_holdout_is_a_function_of_the_seed() -> None:
    held_out = [begun()[1].holdout.samples.tolist() for _ in range(2)]
    assert held_out[0] == held_out[1]
    other = Driver(ForwardSettings(holdout=0.25), LABELS, CLASSES, seed=1).method
    assert isinstance(other, ForwardCorrection)
    assert other.holdout.samples.tolist() != held_out[0]


def test_samples_without_a_label_are_never_held_out() -> None:
    labels = [-1] * 15 + [0, 1, 2, 0, 1]
    method = Driver(ForwardSettings(holdout=0.6), labels, CLASSES).method
    assert isinstance(method, ForwardCorrection)
    assert len(method.holdout.samples) == 3
    assert min(method.holdout.samples) >= 15
