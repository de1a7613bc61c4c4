"""Models: the paper's backbones for small images. All other models come from timm."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from .settings import ModelSettings


def make_model(settings: ModelSettings, *, channels: int, size: int, classes: int) -> nn.Module:
    """See factory.py. It is imported on demand, because reading a config does not need a network."""
    from .factory import make_model

    return make_model(settings, channels=channels, size=size, classes=classes)


def load_exported(folder: Path | str) -> nn.Module:
    """Load the network from a folder written by `sopdist checkpoint export`; see exported.py."""
    from .exported import load_exported

    return load_exported(folder)
