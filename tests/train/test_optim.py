"""The learning rate over time, against torch's own schedulers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler

from sopdist.train.optim import learning_rate, make_optimizer
from sopdist.train.settings import OptimSettings

EPOCH, TOTAL = 7, 42  # steps


def rates(settings: OptimSettings) -> list[float]:
    return [learning_rate(settings, step, EPOCH, TOTAL) for step in range(TOTAL)]


def torch_rates(settings: OptimSettings, warmup: int = 0) -> list[float]:
    """The rates of torch's schedulers, chained, so that the warm-up is a factor."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=settings.lr)
    schedulers: list[lr_scheduler.LRScheduler] = []
    if settings.schedule == "cosine":
        schedulers.append(lr_scheduler.CosineAnnealingLR(optimizer, TOTAL, eta_min=settings.final_lr))
    if settings.schedule == "multistep":
        milestones = [int(epochs * EPOCH) for epochs in settings.milestones]
        schedulers.append(lr_scheduler.MultiStepLR(optimizer, milestones, gamma=settings.gamma))
    if warmup:
        schedulers.append(lr_scheduler.LinearLR(optimizer, start_factor=1 / warmup, total_iters=warmup - 1))
    found = []
    for _ in range(TOTAL):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    return found


@pytest.mark.parametrize(
    "settings",
    [
        OptimSettings(lr=0.3, schedule="constant"),
        OptimSettings(lr=0.3, schedule="cosine"),
        OptimSettings(lr=0.3, schedule="cosine", final_lr=0.01),
        OptimSettings(lr=0.3, schedule="multistep", milestones=(2.0, 4.0), gamma=0.1),
    ],
)
def test_the_schedules_match_those_of_torch(settings: OptimSettings) -> None:
    assert rates(settings) == pytest.approx(torch_rates(settings), rel=1e-9)


@pytest.mark.parametrize("schedule", ["constant", "multistep"])
def test_the_warm_up_is_the_linear_one_of_torch_times_the_schedule(schedule: str) -> None:
    milestones = (1.0, 4.0) if schedule == "multistep" else ()
    settings = OptimSettings(lr=0.3, schedule=schedule, milestones=milestones, warmup_epochs=2.0)
    assert rates(settings) == pytest.approx(torch_rates(settings, warmup=2 * EPOCH), rel=1e-9)


@given(st.sampled_from(["constant", "cosine"]), st.floats(0, 5), st.integers(1, 50), st.integers(1, 500), st.data())
def test_no_rate_is_above_the_configured_one_or_below_zero(
    schedule: str, warmup: float, epoch: int, total: int, data: st.DataObject
) -> None:
    settings = OptimSettings(lr=0.2, schedule=schedule, warmup_epochs=warmup)
    step = data.draw(st.integers(0, 2 * total))  # a resumed run may have been lengthened
    assert 0 <= learning_rate(settings, step, epoch, total) <= 0.2


def test_a_milestone_in_the_middle_of_an_epoch_is_the_nearest_step() -> None:
    settings = OptimSettings(lr=1.0, schedule="multistep", milestones=(0.3,), gamma=0.5)
    assert [learning_rate(settings, step, 10, 20) for step in (2, 3)] == [1.0, 0.5]


def test_the_optimizer_takes_all_trained_parameters_with_the_same_weight_decay() -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    network[0].bias.requires_grad_(False)
    optimizer = make_optimizer(OptimSettings(name="sgd", lr=0.1, momentum=0.8, weight_decay=0.3), network)
    (group,) = optimizer.param_groups
    assert group["params"] == [network[0].weight, network[1].weight, network[1].bias]
    assert (group["weight_decay"], group["momentum"], group["lr"]) == (0.3, 0.8, 0.1)
    adam = make_optimizer(OptimSettings(name="adamw", betas=(0.8, 0.9), weight_decay=0.2), network)
    assert isinstance(adam, torch.optim.AdamW)
    assert adam.defaults["betas"] == (0.8, 0.9)
    assert adam.defaults["weight_decay"] == 0.2
