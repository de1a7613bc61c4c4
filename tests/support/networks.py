"""Building networks, for the tests of models."""

from __future__ import annotations

from typing import Any

from torch import nn

from sopdist.models import make_model
from sopdist.models.settings import ModelSettings


def make(name: str, *, channels: int = 3, size: int = 32, classes: int = 10, **settings: Any) -> nn.Module:
    return make_model(ModelSettings(name, **settings), channels=channels, size=size, classes=classes)


def count_parameters(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())
