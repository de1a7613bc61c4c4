"""A small convolutional network without batch statistics: a sample's logits do not depend on the rest of its batch.

A training step is therefore mathematically the same on any number of ranks, unlike with BatchNorm.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

WIDTHS = (32, 64, 64)
GROUPS = 8


def make(channels: int, size: int, classes: int) -> nn.Module:  # noqa: ARG001 - works for any size
    """Three convolutions with GroupNorm, the last two with stride 2; global average pooling; classifier."""
    widths = (channels, *WIDTHS)
    layers = [
        nn.Sequential(
            nn.Conv2d(before, after, 3, stride=1 if i == 0 else 2, padding=1, bias=False),
            nn.GroupNorm(GROUPS, after),
            nn.ReLU(),
        )
        for i, (before, after) in enumerate(zip(widths, WIDTHS, strict=False))
    ]
    return nn.Sequential(
        OrderedDict(
            layers=nn.Sequential(*layers),
            mean=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            classifier=nn.Linear(WIDTHS[-1], classes),
        )
    )
