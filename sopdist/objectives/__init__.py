"""Objectives: what the network is trained to minimise, one file each, one interface (`base.py`)."""

from __future__ import annotations

import torch
import torch.distributed as dist

from .base import Objective
from .ce import CrossEntropy
from .settings import ObjectiveSettings
from .sop import NoiseAware

__all__ = ["Objective", "ObjectiveSettings", "make_objective"]


def make_objective(
    settings: ObjectiveSettings,
    *,
    samples: int,
    classes: int,
    seed: int,
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> Objective:
    """The objective that a config names."""
    if settings.name == "ce":
        return CrossEntropy()
    return NoiseAware(settings, samples=samples, classes=classes, seed=seed, device=device, group=group)
