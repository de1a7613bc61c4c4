"""Models: the paper's backbones for small images; everything else comes from timm."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from .settings import ModelSettings


def make_model(settings: ModelSettings, *, channels: int, size: int, classes: int) -> nn.Module:
    """See factory.py, which is loaded here and not before: to read a config nobody needs a network."""
    from .factory import make_model

    return make_model(settings, channels=channels, size=size, classes=classes)


def load_exported(folder: Path | str) -> nn.Module:
    """The network of a folder that `sopdist checkpoint export` wrote; see exported.py."""
    from .exported import load_exported

    return load_exported(folder)
