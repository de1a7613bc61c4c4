"""DivideMix step by step: drivers with a chosen division, and the loss of a step in float64.

The pairs that were mixed are read off the images that reached the networks.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sopdist.data.batch import Batch
from sopdist.methods.dividemix import DivideMix, DivideMixSettings, DivisionTable
from tests.support.method_driver import Driver, Taken, parts_of_mixed, softmax

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


def losses_of(logits: Array) -> Array:
    return np.array([-math.log(softmax(row)[label]) for row, label in zip(logits, LABELS, strict=True)])


def draw_logits(seed: int, wrong: list[int]) -> Array:
    """Logits that fit the labels, except those in `wrong`."""
    signs = np.array([-1 if index in wrong else 1 for index in range(SAMPLES)])
    noise = np.random.default_rng(seed).normal(size=(SAMPLES, CLASSES)) * 0.3
    return 2.0 * signs[:, None] * np.eye(CLASSES)[LABELS] + noise


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
