"""The learning rate over time, against torch's own schedulers and closed forms; Adam's betas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler

from sopdist.errors import ConfigError
from sopdist.train.optim import betas, learning_rate, make_optimizer
from sopdist.train.settings import OptimSettings

EPOCH, TOTAL = 7, 42  # steps
ALWAYS_VALID = ("constant", "cosine", "restarts", "linear")  # schedules that need no other setting


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
    if settings.schedule == "restarts":
        steps = round(settings.period * EPOCH)
        schedulers.append(lr_scheduler.CosineAnnealingWarmRestarts(optimizer, steps, eta_min=settings.final_lr))
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
        OptimSettings(lr=0.3, schedule="restarts", period=2.0, final_lr=0.001),
        OptimSettings(lr=0.3, schedule="restarts", period=4.0),
    ],
)
def test_the_schedules_match_those_of_torch(settings: OptimSettings) -> None:
    assert rates(settings) == pytest.approx(torch_rates(settings), rel=1e-9)


@pytest.mark.parametrize("schedule", ["constant", "multistep"])
def test_the_warm_up_is_the_linear_one_of_torch_times_the_schedule(schedule: str) -> None:
    milestones = (1.0, 4.0) if schedule == "multistep" else ()
    settings = OptimSettings(lr=0.3, schedule=schedule, milestones=milestones, warmup_epochs=2.0)
    assert rates(settings) == pytest.approx(torch_rates(settings, warmup=2 * EPOCH), rel=1e-9)


@given(st.sampled_from(ALWAYS_VALID), st.floats(0, 5), st.integers(1, 50), st.integers(1, 500), st.data())
def test_no_rate_is_above_the_configured_one_or_below_zero(
    schedule: str, warmup: float, epoch: int, total: int, data: st.DataObject
) -> None:
    settings = OptimSettings(lr=0.2, schedule=schedule, warmup_epochs=warmup)
    step = data.draw(st.integers(0, 2 * total))  # a resumed run may have been lengthened
    assert 0 <= learning_rate(settings, step, epoch, total) <= 0.2


@given(st.integers(1, 12), st.integers(1, 30), st.integers(0, 2000))
def test_restarts_repeat_the_cosine_of_one_period(period: int, epoch: int, step: int) -> None:
    settings = OptimSettings(lr=0.2, schedule="restarts", period=float(period), final_lr=0.01)
    share = (step % (period * epoch)) / (period * epoch)
    expected = 0.01 + (0.2 - 0.01) * (1 + math.cos(math.pi * share)) / 2
    assert learning_rate(settings, step, epoch, 1) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("period", "epoch"), [(10.0, 391), (0.7, 10), (1.1, 50)])
def test_the_rate_is_full_again_at_every_restart(period: float, epoch: int) -> None:
    """Also where the steps of a period are not exact in floating point: 1.1 * 50 = 55.00000000000001."""
    settings = OptimSettings(lr=0.2, schedule="restarts", period=period, final_lr=0.01)
    at = [learning_rate(settings, cycle * round(period * epoch), epoch, 1000) for cycle in range(20)]
    assert at == pytest.approx([0.2] * 20)


@pytest.mark.parametrize(("first", "last"), [(0.0, 0.0), (2.0, 0.0), (2.0, 0.05), (2.5, 0.0)])
def test_linear_is_full_until_decay_from_and_falls_to_the_final_rate_at_the_end(first: float, last: float) -> None:
    """As published for Co-teaching: (end - t) / (end - start) of the rate from epoch 80 of 200 on."""
    settings = OptimSettings(lr=0.3, schedule="linear", decay_from=first, final_lr=last)
    start = round(first * EPOCH)
    expected = [last + (0.3 - last) * (1 if t < start else (TOTAL - t) / (TOTAL - start)) for t in range(TOTAL + 1)]
    assert [learning_rate(settings, t, EPOCH, TOTAL) for t in range(TOTAL + 1)] == pytest.approx(expected)
    assert expected[-1] == last


def test_linear_that_would_start_after_the_end_stays_full() -> None:
    settings = OptimSettings(lr=0.3, schedule="linear", decay_from=6.0)
    assert set(rates(settings)) == {0.3}


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
@pytest.mark.parametrize("beyond", [1, 100])
def test_beyond_the_end_the_rate_stays_the_final_one(schedule: str, beyond: int) -> None:
    settings = OptimSettings(lr=0.2, schedule=schedule, final_lr=0.01)
    assert learning_rate(settings, TOTAL + beyond, EPOCH, TOTAL) == pytest.approx(0.01)


def test_the_first_beta_changes_where_the_linear_schedule_begins_to_fall() -> None:
    settings = OptimSettings(name="adamw", schedule="linear", decay_from=2.0, betas=(0.9, 0.99), late_beta1=0.1)
    found = [betas(settings, step, EPOCH) for step in range(TOTAL)]
    assert found == [(0.9, 0.99)] * (2 * EPOCH) + [(0.1, 0.99)] * (TOTAL - 2 * EPOCH)
    assert betas(OptimSettings(name="adamw", schedule="linear"), 5, EPOCH) is None


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"schedule": "restarts", "period": 0.0}, r"optim\.period = 0\.0: must be finite and more than 0"),
        ({"schedule": "restarts", "period": math.inf}, r"optim\.period = inf"),
        ({"schedule": "restarts", "period": math.nan}, r"optim\.period = nan"),
        ({"schedule": "linear", "decay_from": -1.0}, r"optim\.decay_from = -1\.0: must be finite and at least 0"),
        ({"schedule": "linear", "decay_from": math.inf}, r"optim\.decay_from = inf"),
        ({"schedule": "linear", "late_beta1": 0.1}, r"optim\.late_beta1: needs optim\.name = adamw"),
        ({"name": "adamw", "late_beta1": 0.1}, r"optim\.late_beta1: needs .* optim\.schedule = linear"),
        ({"name": "adamw", "schedule": "linear", "late_beta1": 1.0}, r"optim\.late_beta1 = 1\.0: must be"),
        ({"name": "adamw", "schedule": "linear", "late_beta1": -0.1}, r"optim\.late_beta1 = -0\.1: must be"),
        ({"schedule": "linear", "milestones": (2.0,)}, r"optim\.milestones: needs optim\.schedule = multistep"),
    ],
)
def test_bad_values_are_refused_by_name(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OptimSettings(**bad)


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
