"""From the `model` section of a config to a network. A network's code is imported when it is asked for.

Initial weights come from torch's global generator: who wants the same ones again seeds it before.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

from torch import nn

from ..config import ConfigError
from .settings import ModelSettings

OURS = ("mlp", "small_conv", "resnet34", "preact_resnet18")  # each is `make` in the file of its name
LARGEST = {"resnet34": 64, "preact_resnet18": 64}  # pixels; with photographs they would be right, and far too slow
FROM_TIMM = "timm:"  # before a name that we have, too


def make_model(settings: ModelSettings, *, channels: int, size: int, classes: int) -> nn.Module:
    """A network from images (B, channels, size, size) to logits (B, classes), in float32 on the CPU."""
    if settings.name in OURS:
        _refuse_options_of_timm(settings)
        _refuse_large_images(settings.name, size)
        make: Callable[[int, int, int], nn.Module] = importlib.import_module(f".{settings.name}", __package__).make
        network, classifiers = make(channels, size, classes), ["classifier"]
    else:
        from . import from_timm

        network = from_timm.make(settings, channels=channels, size=size, classes=classes)
        classifiers = from_timm.classifiers(network)
    if settings.weights:
        from .weights import load_weights

        load_weights(network, Path(settings.weights), classifiers)
    return network


def _refuse_large_images(name: str, size: int) -> None:
    most = LARGEST.get(name, size)
    if size > most:
        raise ConfigError(
            f"model.name = {name!r}: made for images of 32 pixels, up to {most}, but data.recipe makes them {size}; "
            f"take a network of timm, e.g. {FROM_TIMM}resnet34"
        )


def _refuse_options_of_timm(settings: ModelSettings) -> None:
    if settings.pretrained:
        raise ConfigError(
            f"model.pretrained: there are no published weights of {settings.name}, which is ours; leave it out, or "
            "name a local file in model.weights"
        )
    if settings.drop_rate:
        raise ConfigError(f"model.drop_rate = {settings.drop_rate}: {settings.name} has no dropout; leave it out")
