"""DivideMix where a part of the batches is missing, or where only some samples are drawn for an epoch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.support.dividemix_steps import (
    CLASSES,
    LABELS,
    SAMPLES,
    distinct_batch,
    draw_logits,
    items_of,
    make,
    method_of,
    set_both,
    set_clean,
    take_step,
)
from tests.support.method_driver import softmax


def test_equal_losses_label_all_samples() -> None:
    driver = make()
    set_both(driver, np.zeros((SAMPLES, CLASSES)), np.zeros((SAMPLES, CLASSES)))
    parts = driver.begin(2)
    assert [len(part.samples) for part in parts] == [SAMPLES, 0, SAMPLES, 0]
    taken = driver.step(driver.batch_of_parts(parts))
    assert math.isfinite(taken.loss)
    assert taken.outputs[-1].grad is not None
    assert torch.isfinite(taken.outputs[-1].grad).all()


def test_one_labelled_sample_is_enough() -> None:
    driver = make()
    clean = np.full((SAMPLES, 2), 0.1)
    clean[7] = 0.9
    driver.begin(2)
    set_clean(driver, clean)
    parts = method_of(driver).parts(2)
    assert [part.samples.tolist() for part in parts] == [[7], [*range(7), *range(8, 12)]] * 2
    taken = driver.step(distinct_batch(driver, 3))
    assert math.isfinite(taken.loss)


@pytest.mark.parametrize("network", [0, 1])
def test_if_a_network_has_no_labelled_samples_the_epoch_is_another_one_of_warm_up(network: int) -> None:
    driver = make()
    clean = np.full((SAMPLES, 2), 0.9)
    clean[:, network] = 0.1
    clean[3] = np.nan
    driver.begin(2)
    set_clean(driver, clean)
    (part,) = method_of(driver).parts(2)
    assert part.samples is not None
    assert part.samples.tolist() == [i for i in range(SAMPLES) if i != 3]
    taken = driver.step(driver.batch(part.samples.tolist()))
    expected = sum(
        -math.log(softmax(row)[label])
        for row, label in zip(taken.outputs[0].detach(), 2 * [LABELS[i] for i in part.samples], strict=True)
    )
    assert taken.loss == pytest.approx(expected, rel=1e-5)
    assert len(taken.inputs) == 1


def test_an_epoch_that_draws_some_samples_is_ramped_over_its_own_steps() -> None:
    """With data.balanced_per_epoch, samples of earlier draws keep their w, but are not in this epoch."""
    driver = make(batch=2, warmup=1, unlabelled_weight=30.0, ramp=4.0)
    set_both(driver, draw_logits(0, wrong=[0, 1, 6]), draw_logits(1, wrong=[2, 3, 7, 8]))
    for epoch, drawn in ((1, np.arange(6)), (2, np.arange(6, 12))):
        driver.trainer.drawn_samples = drawn
        parts = driver.begin(epoch)
    steps = len(np.intersect1d(parts[0].samples, drawn))  # the stream takes one of those drawn in each step
    assert steps == 5
    clean, batch = driver.table("division")["clean"].double().numpy(), distinct_batch(driver, 2)
    for step in range(3):
        taken, oracle, own = take_step(driver, clean, batch)
        halves = taken.outputs[-1].detach().double().split([2 * len(samples) for samples in own])
        weight = 30.0 * (1 + step / steps) / 4
        expected = sum(float(oracle.loss(n, halves[n], items_of(taken, n, own[n]), weight)) for n in range(2))
        assert taken.loss / len(batch) == pytest.approx(expected, rel=1e-4), f"step {step}"


def test_an_epoch_in_which_no_drawn_sample_is_labelled_is_another_one_of_warm_up() -> None:
    """Labelled samples of earlier draws do not count: the stream would have nothing to read."""
    driver = make()
    set_both(driver, draw_logits(0, wrong=[0, 1]), draw_logits(1, wrong=[0, 1]))
    for epoch, drawn in ((2, np.arange(6)), (3, np.arange(6, 12))):
        driver.trainer.drawn_samples = drawn
        driver.begin(epoch)
    clean = driver.table("division")["clean"].double().numpy()
    clean[drawn] = 0.1
    set_clean(driver, clean)
    first = method_of(driver).parts(3)[0]
    assert first.samples is None or len(np.intersect1d(first.samples, drawn))
