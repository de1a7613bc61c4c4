"""The `model` section of a config."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelSettings:
    """The network."""

    name: str  # one of ours (mlp, small_conv, resnet34, preact_resnet18), or any name that timm knows
    pretrained: bool = False  # start from timm's published weights, which are downloaded once
    weights: str = ""  # start from a local file instead: .safetensors, or a .pth of plain tensors
    drop_rate: float = 0.0  # dropout before the classifier, for networks of timm
