"""The optimizer, and the learning rate as a function of the step. Stateless; independent of the architecture."""

from __future__ import annotations

import math
from bisect import bisect_right

import torch
from torch import nn
from torch.optim import Optimizer

from .settings import OptimSettings


def make_optimizer(settings: OptimSettings, network: nn.Module) -> Optimizer:
    """SGD or AdamW over all trainable parameters. Weight decay applies to all of them, as in the paper."""
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    if settings.name == "sgd":
        return torch.optim.SGD(
            parameters, lr=settings.lr, momentum=settings.momentum, nesterov=settings.nesterov,
            weight_decay=settings.weight_decay,
        )  # fmt: skip
    return torch.optim.AdamW(parameters, lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay)


def learning_rate(settings: OptimSettings, step: float, steps_per_epoch: int, total_steps: int) -> float:
    """Learning rate of optimizer step `step`, which counts from 0 over all epochs.

    During a warm-up of w steps, step t uses (t + 1) / w of the scheduled rate. The schedule itself starts at step 0.
    With cosine and linear, step `total_steps` would use the final rate.
    """
    warmup = settings.warmup_epochs * steps_per_epoch
    return _scheduled(settings, step, steps_per_epoch, total_steps) * (min(1.0, (step + 1) / warmup) if warmup else 1.0)


def _scheduled(settings: OptimSettings, step: float, steps_per_epoch: int, total_steps: int) -> float:
    if settings.schedule == "multistep":
        passed = bisect_right([round(milestone * steps_per_epoch) for milestone in settings.milestones], step)
        return settings.lr * settings.gamma**passed
    if settings.schedule == "constant":
        return settings.lr
    if settings.schedule == "restarts":
        period = max(1, round(settings.period * steps_per_epoch))
        share = step % period / period
    elif settings.schedule == "cosine":
        share = min(1.0, step / total_steps) if total_steps else 1.0
    else:
        first = decay_start(settings, steps_per_epoch)
        left = (total_steps - step) / (total_steps - first) if total_steps > first else float(step < total_steps)
        left = min(1.0, max(0.0, left))
        return settings.final_lr + (settings.lr - settings.final_lr) * left
    return settings.final_lr + (settings.lr - settings.final_lr) * (1 + math.cos(math.pi * share)) / 2


def decay_start(settings: OptimSettings, steps_per_epoch: int) -> int:
    """The step at which the schedule `linear` begins to fall."""
    return round(settings.decay_from * steps_per_epoch)


def betas(settings: OptimSettings, step: float, steps_per_epoch: int) -> tuple[float, float] | None:
    """Adam's betas at a step; None if they do not change."""
    if settings.late_beta1 is None:
        return None
    late = step >= decay_start(settings, steps_per_epoch)
    return (settings.late_beta1 if late else settings.betas[0], settings.betas[1])
