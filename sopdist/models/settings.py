"""The `model` section of a config."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigError


@dataclass(frozen=True)
class ModelSettings:
    """The network."""

    name: str  # built-in: mlp, small_conv, cnn9, resnet34, preact_resnet18; or any timm model (timm:NAME if both exist)
    pretrained: bool = False  # start from timm's pretrained weights, which are downloaded once
    weights: str = ""  # start from a local file instead: .safetensors, or a .pth of plain tensors
    drop_rate: float = 0.0  # dropout before the classifier, for timm models

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("model.name: must name a network, e.g. resnet34")
        if self.pretrained and self.weights:
            raise ConfigError(
                f"model.weights = {self.weights!r}: cannot be set together with model.pretrained; remove one of them"
            )
        if not 0 <= self.drop_rate < 1:
            raise ConfigError(f"model.drop_rate = {self.drop_rate}: must be at least 0 and less than 1")
