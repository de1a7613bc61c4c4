"""Builds a network from the `model` section of a config. The code of a network is imported on demand.

Initial weights are drawn from torch's global generator: seed it first to make them reproducible.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

from torch import nn

from ..errors import ConfigError
from .settings import ModelSettings

BUILTIN_MODELS = (
    "mlp",
    "small_conv",
    "cnn9",
    "resnet34",
    "preact_resnet18",
)  # each is `make` in the module of the same name
MAX_IMAGE_SIZE = {
    "cnn9": 64,
    "resnet34": 64,
    "preact_resnet18": 64,
}  # pixels; larger images would work, but far too slowly
TIMM_PREFIX = "timm:"  # selects timm's model if there is a built-in model of the same name


def make_model(settings: ModelSettings, *, channels: int, size: int, classes: int) -> nn.Module:
    """Build a network from images (B, channels, size, size) to logits (B, classes), in float32 on the CPU."""
    if settings.name in BUILTIN_MODELS:
        _check_options(settings)
        _check_image_size(settings.name, size)
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


def _check_image_size(name: str, size: int) -> None:
    maximum = MAX_IMAGE_SIZE.get(name, size)
    if size > maximum:
        raise ConfigError(
            f"model.name = {name!r}: designed for images of 32 pixels, at most {maximum}, but data.recipe makes them "
            f"{size}; use a timm model, e.g. {TIMM_PREFIX}resnet34"
        )


def _check_options(settings: ModelSettings) -> None:
    if settings.pretrained:
        raise ConfigError(
            f"model.pretrained: there are no pretrained weights of {settings.name}, a built-in model; leave it out, or "
            "set model.weights to a local file"
        )
    if settings.drop_rate:
        raise ConfigError(f"model.drop_rate = {settings.drop_rate}: {settings.name} has no dropout; leave it out")
