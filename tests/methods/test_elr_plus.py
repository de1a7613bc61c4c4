"""ELR+: a step of both networks against float64, with the pairs read off the images that reach the networks."""

from __future__ import annotations

import math
from copy import deepcopy

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sopdist.methods.averaged import average_towards
from sopdist.methods.elr_plus import AveragedPair, ELRPlus, ELRPlusSettings
from tests.support.method_driver import Driver, Taken, parts_of_mixed, softmax

SAMPLES, CLASSES = 6, 3
LABELS = [0, 1, 2, 0, 1, 2]
Array = NDArray[np.float64]


def logits_of(network: nn.Module) -> Array:
    """Of every sample, from the weights: images are unit vectors."""
    linear = list(network.modules())[-1]
    assert isinstance(linear, nn.Linear)
    found: Array = (linear.weight.detach().double().T + linear.bias.detach().double()).numpy()
    return found


class ByHand:
    """Follows a run of ELR+: the averages and targets of both networks."""

    def __init__(self, settings: ELRPlusSettings, network: AveragedPair) -> None:
        self.settings = settings
        self.targets = np.zeros((2, SAMPLES, CLASSES))
        self.averages = [self._weights(network.first), self._weights(network.second)]
        self.step = 0

    @staticmethod
    def _weights(network: nn.Module) -> list[Array]:
        return [value.detach().double().numpy().copy() for value in network.state_dict().values()]

    def update_targets(self) -> None:
        for own in range(2):
            weight, bias = self.averages[1 - own]
            beta = self.settings.beta
            self.targets[own] = beta * self.targets[own] + (1 - beta) * softmax(weight.T + bias)

    def loss(self, logits: Tensor, own: int, pairs: list[dict[int, float]]) -> Tensor:
        """The sum over the mixed images of one network, from its logits in float64."""
        settings, total = self.settings, torch.zeros((), dtype=torch.float64)
        for z, parts in zip(logits, pairs, strict=True):
            wanted = sum(share * np.eye(CLASSES)[LABELS[sample]] for sample, share in parts.items())
            target = sum(share * self.targets[own][sample] for sample, share in parts.items())
            if settings.sharpen_labels:
                wanted = wanted * target / (wanted * target).sum()
            p = z.exp() / z.exp().sum()
            clipped = torch.minimum(torch.maximum(p, torch.tensor(1e-4)), torch.tensor(1 - 1e-4))
            strength = settings.strength * self._ramp(self.step, settings.strength_ramp)
            total = total - (torch.from_numpy(wanted) * p.log()).sum()
            total = total + strength * (1 - (torch.from_numpy(target) * clipped).sum()).log()
        return total

    def update_averages(self, network: AveragedPair) -> None:
        settings = self.settings
        if settings.ema_ramp:
            decay = self._ramp(self.step + 1, settings.ema_ramp) * settings.ema
        else:
            decay = min(1 - 1 / (self.step + 1), settings.ema)
        for average, current in zip(self.averages, (network.first, network.second), strict=True):
            for kept, value in zip(average, self._weights(current), strict=True):
                kept *= decay
                kept += (1 - decay) * value
        self.step += 1

    @staticmethod
    def _ramp(step: int, length: int) -> float:
        return math.exp(-5 * (1 - min(step, length) / length) ** 2) if length else 1.0


def mixed_pairs(taken: Taken) -> list[dict[int, float]]:
    """The last forward pass is that on mixed images."""
    return parts_of_mixed(taken.inputs[-1][0])


@pytest.mark.parametrize(
    "settings",
    [
        ELRPlusSettings(),
        ELRPlusSettings(strength=7.0, beta=0.9, strength_ramp=3, sharpen_labels=True, ema_ramp=5),
        ELRPlusSettings(mixup_alpha=1.5, ema=0.6, ema_ramp=0),
        ELRPlusSettings(mixup_alpha=0.0, ema=0.0),
    ],
    ids=["as published for CIFAR-10", "CIFAR-100", "WebVision", "no mixup, no average"],
)
def test_a_run_is_that_of_the_formulas(settings: ELRPlusSettings) -> None:
    """Losses, gradients, targets and averages over six steps of gradient descent."""
    driver = Driver(settings, LABELS, CLASSES)
    method = driver.method
    assert isinstance(method, ELRPlus)
    oracle = ByHand(settings, method.network)
    driver.begin(0)
    for _ in range(6):
        before = deepcopy(driver.network)
        taken = driver.step(driver.batch(range(SAMPLES)), lr=0.3)
        oracle.update_targets()
        logits = taken.outputs[-1].detach().double().requires_grad_()
        halves, pairs = logits.unflatten(0, (2, SAMPLES)), mixed_pairs(taken)
        expected = oracle.loss(halves[0], 0, pairs) + oracle.loss(halves[1], 1, pairs)
        expected.backward()
        assert taken.loss == pytest.approx(float(expected.detach()), rel=1e-4)
        assert taken.outputs[-1].grad is not None
        assert logits.grad is not None
        torch.testing.assert_close(taken.outputs[-1].grad.double(), logits.grad, rtol=1e-3, atol=1e-4)
        for half, name in zip(halves, ("first", "second"), strict=True):  # of mixed images, by the networks themselves
            mixed = [sum(share * logits_of(getattr(before, name))[i] for i, share in parts.items()) for parts in pairs]
            np.testing.assert_allclose(half.detach(), mixed, atol=1e-4)
        oracle.update_averages(method.network)
        np.testing.assert_allclose(driver.table("target")["target"].movedim(1, 0), oracle.targets, atol=1e-5)
        averages = method.network.average.first, method.network.average.second
        for (weight, bias), found in zip(oracle.averages, averages, strict=True):
            np.testing.assert_allclose(logits_of(found), weight.T + bias, atol=1e-5)


def test_all_pairs_of_a_step_have_one_share_of_at_least_one_half() -> None:
    driver = Driver(ELRPlusSettings(), LABELS, CLASSES)
    driver.begin(0)
    for _ in range(20):
        pairs = mixed_pairs(driver.step(driver.batch(range(SAMPLES))))
        shares = {max(parts.values()) for parts in pairs if len(parts) == 2}
        assert len(shares) == 1
        assert 0.5 <= shares.pop() <= 1
        owners = [max(parts, key=lambda sample: parts[sample]) for parts in pairs]
        assert owners == list(range(SAMPLES)), "the larger share is that of the sample itself"


def test_an_average_includes_batch_statistics() -> None:
    torch.manual_seed(0)
    average, current = (nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)) for _ in range(2))
    current(torch.randn(8, 3))
    expected = {
        name: value if name.endswith("num_batches_tracked") else 0.8 * average.state_dict()[name].double() + 0.2 * value
        for name, value in current.state_dict().items()
    }
    average_towards(average, current, 0.8)
    for name, value in average.state_dict().items():
        torch.testing.assert_close(value.double(), expected[name].double(), rtol=1e-6, atol=1e-7)
    assert int(average.state_dict()["1.num_batches_tracked"]) == 1


def test_averages_predict_in_evaluation_mode_and_get_no_gradient() -> None:
    def backbone(features: int, classes: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(features), nn.Linear(features, classes))

    driver = Driver(ELRPlusSettings(ema=0.9, ema_ramp=0), LABELS, CLASSES, backbone=backbone)
    network = driver.network
    assert isinstance(network, AveragedPair)
    driver.begin(0)
    batch = driver.batch(range(SAMPLES))
    for _ in range(3):
        expected = deepcopy(network.average).eval()(batch.images)
        taken = driver.step(batch)
        torch.testing.assert_close(taken.outputs[0], expected, rtol=0, atol=0)
        assert not taken.outputs[0].requires_grad
        assert all(parameter.grad is None for parameter in network.average.parameters())
    first, average = (dict(each.named_buffers()) for each in (network.first, network.average.first))
    assert first["1.running_mean"].any()
    assert int(first["1.num_batches_tracked"]) == int(average["1.num_batches_tracked"]) == 3
    trained = [name for name, parameter in network.named_parameters() if parameter.requires_grad]
    assert trained == [name for name, _ in network.named_parameters() if not name.startswith("average.")]
