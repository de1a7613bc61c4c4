"""Exported networks: a folder with `model.safetensors` and `config.json`, for use without the run that trained it.

    network = load_exported("exported/cifar10")      # logits = network((pixels / 255 - mean) / std)
    read_exported("exported/cifar10").label_names    # class names, in the order of the logits

This module knows the inputs and outputs of a network, but not checkpoints or data sets. No code in the folder is
executed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..config import build
from ..errors import ConfigError, DataError
from .factory import BUILTIN_MODELS, TIMM_PREFIX, make_model
from .settings import ModelSettings

FORMAT = 1
CONFIG = "config.json"
WEIGHTS = "model.safetensors"  # timm also looks for this name
SECTION = "sopdist"  # of config.json; the other keys are for timm
_MAX_BYTES = 64 << 20  # of a config; enough for a million long class names


@dataclass(frozen=True)
class Exported:
    """The description of an exported network, in addition to its weights."""

    name: str  # as model.name; a timm model is timm:ARCHITECTURE
    channels: int  # of the input image
    size: int  # side of the square input image
    classes: int
    mean: list[float]  # per channel, for pixels from 0 to 1
    std: list[float]
    resize: int = 0  # short side of the image before the centre crop of `size`; 0: the full image is resized to size
    drop_rate: float = 0.0
    label_names: list[str] | None = None  # class names, in the order of the logits
    step: int = 0  # at which it was saved
    epoch: float = 0.0
    version: str = ""  # of the sopdist that wrote it
    format: int = FORMAT

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ConfigError(f"format = {self.format}: this sopdist reads {FORMAT}; use sopdist {self.version}")
        if self.name not in BUILTIN_MODELS and (
            not self.name.startswith(TIMM_PREFIX) or ":" in self.name[len(TIMM_PREFIX) :]
        ):
            raise ConfigError(
                f"name = {self.name!r}: must be one of {', '.join(BUILTIN_MODELS)}, or {TIMM_PREFIX}ARCHITECTURE"
            )
        if min(self.channels, self.size, self.classes) < 1:
            raise ConfigError(f"channels = {self.channels}, size = {self.size}, classes = {self.classes}: too small")
        if not len(self.mean) == len(self.std) == self.channels:
            raise ConfigError(f"mean, std: must have {self.channels} entries, one per channel")
        if self.label_names is not None and len(self.label_names) != self.classes:
            raise ConfigError(f"label_names: must have {self.classes} entries, found {len(self.label_names)}")

    @property
    def is_timm(self) -> bool:
        """Whether the network is a timm model."""
        return self.name.startswith(TIMM_PREFIX)


def load_exported(folder: Path | str) -> nn.Module:
    """Load the network from a folder written by `sopdist checkpoint export`, on the CPU and in evaluation mode."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(folder) / WEIGHTS
    exported = read_exported(folder)
    try:
        state = load_file(path)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    try:
        return build_network(exported, state)
    except ConfigError as error:
        raise DataError(f"{path}: {error}") from None


def read_exported(folder: Path | str) -> Exported:
    """Read the `config.json` of such a folder."""
    path = Path(folder) / CONFIG
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise DataError(f"{path}: too large for the config of a network")
        tree: Any = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    section = tree.get(SECTION) if isinstance(tree, dict) else None
    if not isinstance(section, dict):
        raise DataError(f"{path}: was not written by `sopdist checkpoint export`: it has no section {SECTION!r}")
    try:
        return build(Exported, section, f"{SECTION}.")
    except ConfigError as error:
        raise DataError(f"{path}: {error}") from None


def build_network(exported: Exported, state: dict[str, Tensor]) -> nn.Module:
    """Build the network with these weights, in evaluation mode. ConfigError if they belong to another network."""
    settings = ModelSettings(exported.name, drop_rate=exported.drop_rate)
    network = make_model(settings, channels=exported.channels, size=exported.size, classes=exported.classes)
    try:
        network.load_state_dict(state)
    except RuntimeError as error:
        raise ConfigError(f"not the weights of {exported.name} with {exported.classes} classes: {error}") from None
    return network.eval()
