"""DivideMix: the division, and a step of both networks against float64, with the pairs read off the mixed images."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sopdist.data.batch import Batch
from sopdist.methods.dividemix import DivideMix, DivideMixSettings, DivisionTable
from tests.support.method_driver import Driver, Taken, parts_of_mixed, softmax
from tests.support.two_normals import rescaled, small_posterior

SAMPLES, CLASSES, BATCH = 12, 3, 8
LABELS = [index % CLASSES for index in range(SAMPLES)]
Array = NDArray[np.float64]


def make(batch: int = BATCH, labels: list[int] | None = None, **settings: float | int | bool | None) -> Driver:
    given = {"warmup": 2, "ramp": 4.0} | settings
    return Driver(DivideMixSettings(**given), LABELS if labels is None else labels, CLASSES, batch=batch)


def method_of(driver: Driver) -> DivideMix:
    assert isinstance(driver.method, DivideMix)
    return driver.method


def set_clean(driver: Driver, clean: Array) -> None:
    """w of both networks, (samples, 2)."""
    table = driver.method.tables()["division"]
    assert isinstance(table, DivisionTable)
    table.clean.copy_(torch.from_numpy(clean))


def divided(driver: Driver, epoch: int = 2, seed: int = 0) -> Array:
    """Begin an epoch with random w; returns them, (samples, 2)."""
    driver.begin(epoch)
    clean = np.random.default_rng(seed).random((SAMPLES, 2)).astype(np.float32)
    set_clean(driver, clean.astype(np.float64))
    return clean.astype(np.float64)


def set_both(driver: Driver, first: Array, second: Array) -> None:
    network = method_of(driver).network
    driver.set_logits(first, network.first)
    driver.set_logits(second, network.second)


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


def losses_of(logits: Array) -> Array:
    return np.array([-math.log(softmax(row)[label]) for row, label in zip(logits, LABELS, strict=True)])


def draw_logits(seed: int, wrong: list[int]) -> Array:
    """Logits that fit the labels, except those in `wrong`."""
    signs = np.array([-1 if index in wrong else 1 for index in range(SAMPLES)])
    noise = np.random.default_rng(seed).normal(size=(SAMPLES, CLASSES)) * 0.3
    return 2.0 * signs[:, None] * np.eye(CLASSES)[LABELS] + noise


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
    np.testing.assert_allclose(read.scores, 1 - mean, atol=1e-6)


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


class ByHand:
    """The loss of one step in float64, from the weights before it and the images that reached the networks."""

    def __init__(self, driver: Driver, clean: Array) -> None:
        self.settings, self.clean = method_of(driver).settings, clean
        pair = method_of(driver).network
        self.logits = [self._logits(network) for network in (pair.first, pair.second)]  # (views, samples, K) each

    @staticmethod
    def _logits(network: nn.Module) -> Array:
        layer = list(network.modules())[-1]
        assert isinstance(layer, nn.Linear)
        by_feature = (layer.weight.detach().double().T + layer.bias.detach().double()).numpy()
        found: Array = by_feature.reshape(2, SAMPLES, CLASSES)
        return found

    def is_labelled(self, network: int, sample: int) -> bool:
        return bool(self.clean[sample, 1 - network] > self.settings.threshold)

    def target(self, network: int, sample: int) -> Array:
        own, peer = (softmax(self.logits[which][:, sample]).mean(0) for which in (network, 1 - network))
        guess = (own + peer) / 2
        if self.is_labelled(network, sample):
            w = self.clean[sample, 1 - network]
            guess = w * np.eye(CLASSES)[LABELS[sample]] + (1 - w) * own
        sharp: Array = guess ** (1 / self.settings.temperature)
        return sharp / sharp.sum()

    def loss(self, network: int, logits: Tensor, items: list[tuple[int, dict[int, float]]], weight: float) -> Tensor:
        """Of mixed items, each with its own unit vector and all that it consists of; `weight` of the unlabelled."""
        supervised, squares, p_of_items = [], [], []
        for z, (own, parts) in zip(logits, items, strict=True):
            p = z.exp() / z.exp().sum()
            wanted = torch.from_numpy(sum(share * self.target(network, at % SAMPLES) for at, share in parts.items()))
            p_of_items.append(p)
            if self.is_labelled(network, own % SAMPLES):
                supervised.append(-(wanted * p.log()).sum())
            else:
                squares.append((p - wanted).square().sum() / CLASSES)
        mean = torch.stack(p_of_items).mean(0)
        regularised = sum((1 / CLASSES) * ((1 / CLASSES) / share).log() for share in mean)
        total = torch.stack(supervised).mean() + regularised
        return total + weight * torch.stack(squares).mean() if squares else total


def take_step(driver: Driver, clean: Array, batch: Batch, lr: float = 0.0) -> tuple[Taken, ByHand, list[list[int]]]:
    """Also the oracle of the step, and the samples of the batch by network, in its order."""
    oracle = ByHand(driver, clean)
    networks = networks_of(driver, oracle, batch)
    own = [[int(i) for i, which in zip(batch.index, networks, strict=True) if which == n] for n in range(2)]
    return driver.step(batch, lr), oracle, own


def networks_of(driver: Driver, oracle: ByHand, batch: Batch) -> list[int]:
    """Which network each column is for: parts are a labelled and an unlabelled one for each network."""
    first = method_of(driver).parts(2)[0].samples
    assert first is not None
    (leading,) = (n for n in range(2) if all(oracle.is_labelled(n, int(sample)) for sample in first))
    assert batch.part is not None
    return [leading if part < 2 else 1 - leading for part in batch.part.tolist()]


def distinct_batch(driver: Driver, count: int) -> Batch:
    """The first `count` samples of every part, in turn."""
    parts = method_of(driver).parts(2)
    columns = [
        (place, int(sample), number)
        for number, part in enumerate(parts)
        for place, sample in enumerate([] if part.samples is None else part.samples[:count])
    ]
    columns.sort()
    return driver.batch([sample for _, sample, _ in columns], part=[number for _, _, number in columns])


def items_of(taken: Taken, network: int, own: list[int]) -> list[tuple[int, dict[int, float]]]:
    """The mixed items of one network: the first views of its samples in the order of the batch, then the second."""
    features = [*own, *(sample + SAMPLES for sample in own)]
    return list(zip(features, parts_of_mixed(taken.inputs[-1][network]), strict=True))


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


# -- parts that are missing --------------------------------------------------------------------------------------------


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
