"""Co-teaching and Co-teaching+: who learns from which samples, by brute force over small batches."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sopdist.methods.coteaching import Coteaching, CoteachingSettings, smallest
from sopdist.methods.coteaching_plus import CoteachingPlus, CoteachingPlusSettings
from tests.support.method_driver import Driver, Taken, softmax

SAMPLES = 7
Logits = list[np.ndarray]  # of both networks, (samples, K) each


def draw_logits(seed: int, classes: int) -> Logits:
    return [np.random.default_rng([seed, network]).normal(size=(SAMPLES, classes)) * 2 for network in range(2)]


def losses_of(logits: np.ndarray, labels: list[int]) -> list[float]:
    return [-math.log(softmax(row)[label]) for row, label in zip(logits, labels, strict=True)]


def kept_by_hand(losses: list[float], candidates: list[int], forget: float) -> list[int]:
    """Of all choices of (1 - f) n candidates, rounded down, that with the smallest losses; of equal ones the first."""
    count = math.floor((1 - Fraction(str(forget))) * len(candidates)) or len(candidates)
    choices = itertools.combinations(candidates, count)
    return list(min(choices, key=lambda chosen: (sorted(losses[i] for i in chosen), chosen)))


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=8),  # many ties
    st.data(),
    st.sampled_from([0.0, 0.2, 0.25, 0.5, 0.7, 0.99]),
)
def test_the_smallest_losses_are_kept_and_of_equal_ones_the_first(
    losses: list[int], data: st.DataObject, forget: float
) -> None:
    candidates = sorted(data.draw(st.sets(st.integers(0, len(losses) - 1))))
    mask = torch.zeros(len(losses), dtype=torch.bool)
    mask[candidates] = True
    found = smallest(torch.tensor(losses, dtype=torch.float32), mask, forget)
    assert found.nonzero()[:, 0].tolist() == (kept_by_hand(losses, candidates, forget) if candidates else [])


def test_a_share_to_forget_that_leaves_a_tenth_of_ten_samples_leaves_one() -> None:
    """(1 - 0.9) * 10 is 0.9999999999999998 in floating point."""
    assert int(smallest(torch.arange(10.0), torch.ones(10, dtype=torch.bool), 0.9).sum()) == 1


# -- Co-teaching -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "epochs", "ramp"),
    [
        (CoteachingSettings(forget=0.4, ramp=10), 200, 10),
        (CoteachingSettings(forget=0.4, ramp=5, exponent=2.0), 200, 5),
        (CoteachingSettings(forget=0.4), 200, 10),
        (CoteachingSettings(forget=0.4), 40, 4),
        (CoteachingSettings(forget=0.4), 5, 1),
        (CoteachingSettings(forget=0.4, ramp=1), 5, 1),
    ],
)
def test_the_share_that_is_left_out_rises_as_published(settings: CoteachingSettings, epochs: int, ramp: int) -> None:
    """linspace(0, tau^c, T_k) over the first T_k epochs, then tau."""
    driver = Driver(settings, [0, 1] * 4, 2, epochs=epochs)
    assert isinstance(driver.method, Coteaching)
    found = []
    for epoch in range(20):
        driver.begin(epoch)
        found.append(driver.method.forget)
    rising = np.linspace(0, settings.forget**settings.exponent, ramp)
    assert found == pytest.approx([*rising, *[settings.forget] * (20 - ramp)])


def begun(driver: Driver, logits: Logits, epoch: int) -> Coteaching:
    """The driver in this epoch, with these logits of both networks."""
    method = driver.method
    assert isinstance(method, Coteaching)
    driver.set_logits(logits[0], method.network.first)
    driver.set_logits(logits[1], method.network.second)
    driver.begin(epoch)
    return method


def assert_learned_from(
    taken: Taken, logits: Logits, labels: list[int], kept: list[list[int]], *, softmaxes: int = 1
) -> None:
    """Network a learned from mean CE_a over what b kept, and the other way round; `kept` is by who chose."""
    exact = [torch.from_numpy(z).requires_grad_() for z in logits]
    expected = torch.zeros((), dtype=torch.float64)
    for own, chosen in ((0, kept[1]), (1, kept[0])):
        for sample in chosen:
            p = exact[own][sample]
            for _ in range(softmaxes):
                p = p.exp() / p.exp().sum()
            expected = expected - p[labels[sample]].log() / len(chosen)
    if expected.requires_grad:
        expected.backward()
    assert taken.loss / SAMPLES == pytest.approx(float(expected.detach()), rel=1e-5, abs=1e-7)
    wanted = torch.cat([torch.zeros_like(z) if z.grad is None else z.grad for z in exact])
    assert taken.outputs[0].grad is not None
    torch.testing.assert_close(taken.outputs[0].grad.double() / SAMPLES, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("seed", range(4))
def test_each_network_learns_from_the_samples_that_the_other_keeps(classes: int, seed: int) -> None:
    labels = [index % classes for index in range(SAMPLES)]
    logits = draw_logits(seed, classes)
    driver = Driver(CoteachingSettings(forget=0.5, ramp=3), labels, classes)
    for epoch, forget in enumerate([0, 0.25, 0.5, 0.5]):
        begun(driver, logits, epoch)
        taken = driver.step(driver.batch(range(SAMPLES)))
        kept = [kept_by_hand(losses_of(z, labels), list(range(SAMPLES)), forget) for z in logits]
        assert_learned_from(taken, logits, labels, kept)
        assert [len(chosen) for chosen in kept] == [int((1 - forget) * SAMPLES)] * 2


def test_equal_losses_are_kept_in_the_order_of_the_batch() -> None:
    labels = [0] * SAMPLES
    logits = [np.zeros((SAMPLES, 2))] * 2
    driver = Driver(CoteachingSettings(forget=0.5, ramp=1), labels, 2)
    begun(driver, logits, 1)
    assert_learned_from(driver.step(driver.batch(range(SAMPLES))), logits, labels, [[0, 1, 2]] * 2)


def test_if_nothing_would_remain_all_samples_are_kept() -> None:
    labels, logits = [0, 1, 0, 1, 0, 1, 0], draw_logits(0, 2)
    driver = Driver(CoteachingSettings(forget=0.99, ramp=1), labels, 2)
    begun(driver, logits, 1)
    assert_learned_from(driver.step(driver.batch(range(SAMPLES))), logits, labels, [list(range(SAMPLES))] * 2)


def test_a_label_is_flagged_if_it_was_left_out_more_often_than_not() -> None:
    """The score is a moving average, 0.8 of which remains, of the share of networks that left it out."""
    labels = [0, 1, 2, 0, 1, 2, 0]
    driver = Driver(CoteachingSettings(forget=0.4, ramp=1), labels, 3)
    scores: list[float] = []
    for epoch in range(1, 5):
        logits = draw_logits(epoch, 3)
        method = begun(driver, logits, epoch)
        driver.step(driver.batch(range(SAMPLES)))
        kept = [kept_by_hand(losses_of(z, labels), list(range(SAMPLES)), 0.4) for z in logits]
        now = [1 - sum(i in chosen for chosen in kept) / 2 for i in range(SAMPLES)]
        scores = [0.8 * old + 0.2 * new for old, new in zip(scores, now, strict=True)] if scores else now
    found = method.readout(torch.tensor(labels))
    np.testing.assert_allclose(found.scores, scores, atol=1e-6)
    assert found.flags.tolist() == [score > 0.5 for score in scores]
    assert any(found.flags)
    together = (logits[0] + logits[1]).argmax(1)
    assert found.proposed.tolist() == [together[i] if found.flags[i] else labels[i] for i in range(SAMPLES)]


# -- Co-teaching+ ------------------------------------------------------------------------------------------------------


def plus(labels: list[int], classes: int, **settings: float | int | bool | None) -> Driver:
    given = {"forget": 0.4, "ramp": 1, "warmup": 2} | settings
    return Driver(CoteachingPlusSettings(**given), labels, classes)


def agreeing(labels: list[int], classes: int) -> Logits:
    """Both networks predict the same classes, with different losses."""
    one, other = draw_logits(5, classes)
    other = np.where(np.eye(classes, dtype=bool)[one.argmax(1)], other.max() + 1 + 0.1 * one, other)
    assert (one.argmax(1) == other.argmax(1)).all()
    assert losses_of(one, labels) != losses_of(other, labels)
    return [one, other]


@pytest.mark.parametrize("double", [False, True], ids=["plain", "double softmax"])
@pytest.mark.parametrize("seed", range(3))
def test_after_the_warm_up_only_disagreements_take_part(seed: int, double: bool) -> None:
    labels = [0, 1, 2, 0, 1, 2, 0]
    logits = draw_logits(seed, 3)
    driver = plus(labels, 3, double_softmax=double)
    for epoch in (1, 2, 3):
        begun(driver, logits, epoch)
        taken = driver.step(driver.batch(range(SAMPLES)))
        everyone = list(range(SAMPLES))
        differ = [i for i in everyone if logits[0][i].argmax() != logits[1][i].argmax()]
        assert 0 < len(differ) < SAMPLES
        twice = double and epoch >= 2
        seen = [softmax(z) if twice else z for z in logits]
        candidates = everyone if epoch < 2 else differ
        kept = [kept_by_hand(losses_of(z, labels), candidates, 0.4) for z in seen]
        assert_learned_from(taken, logits, labels, kept, softmaxes=1 + twice)


def test_labels_are_judged_by_their_losses_among_all_samples_of_the_batch() -> None:
    """Also those on which the networks agree, from which nothing is learned."""
    labels = [0, 1, 2, 0, 1, 2, 0]
    driver, scores = plus(labels, 3), list[float]()
    for epoch in (2, 3, 4):
        logits = draw_logits(epoch, 3)
        method = begun(driver, logits, epoch)
        driver.step(driver.batch(range(SAMPLES)))
        kept = [kept_by_hand(losses_of(z, labels), list(range(SAMPLES)), 0.4) for z in logits]
        now = [1 - sum(i in chosen for chosen in kept) / 2 for i in range(SAMPLES)]
        scores = [0.8 * old + 0.2 * new for old, new in zip(scores, now, strict=True)] if scores else now
    np.testing.assert_allclose(method.readout(torch.tensor(labels)).scores, scores, atol=1e-6)
    assert driver.table("left_out")["visits"].tolist() == [3] * SAMPLES


def test_if_nobody_disagrees_both_learn_from_the_whole_batch_early_and_from_nothing_late() -> None:
    """While epoch x step of the epoch < agree_steps."""
    labels = [0, 1, 2, 0, 1, 2, 0]
    logits = agreeing(labels, 3)
    driver = plus(labels, 3, agree_steps=7)
    everyone = list(range(SAMPLES))
    for epoch in (2, 3, 8):
        begun(driver, logits, epoch)
        for step in range(5):
            taken = driver.step(driver.batch(everyone))
            early = epoch * step < 7
            assert_learned_from(taken, logits, labels, [everyone if early else []] * 2)


def test_if_so_few_disagree_that_none_would_remain_all_of_them_are_kept() -> None:
    labels = [0, 1, 2, 0, 1, 2, 0]
    logits = agreeing(labels, 3)
    logits[1][4] = np.roll(logits[1][4], 1)  # the only disagreement
    driver = plus(labels, 3, forget=0.8)
    begun(driver, logits, 5)
    assert_learned_from(driver.step(driver.batch(range(SAMPLES))), logits, labels, [[4], [4]])


def test_by_default_the_warm_up_is_a_tenth_of_the_run() -> None:
    driver = Driver(CoteachingPlusSettings(), [0, 1] * 3, 2, epochs=40)
    method = driver.method
    assert isinstance(method, CoteachingPlus)
    predicted, counts = torch.tensor([[0, 1, 1], [0, 0, 1]]), torch.ones(3, dtype=torch.bool)
    found: list[list[bool]] = []
    for epoch in (3, 4):
        driver.begin(epoch)
        candidates: Tensor = method.candidates(predicted, counts)[0]
        found.append(candidates.tolist())
    assert found == [[True, True, True], [False, True, False]]
