"""A small convolutional network without batch statistics: a sample's logits do not depend on who shares its batch.

So the mathematics of a step is the same on any number of ranks, which BatchNorm's is not.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

WIDTHS = (32, 64, 64)
GROUPS = 8


def make(channels: int, size: int, classes: int) -> nn.Module:  # noqa: ARG001 - any size will do
    """Three convolutions with GroupNorm, the last two with stride 2; mean over the places; classifier."""
    widths = (channels, *WIDTHS)
    layers = [
        nn.Sequential(
            nn.Conv2d(before, after, 3, stride=1 if place == 0 else 2, padding=1, bias=False),
            nn.GroupNorm(GROUPS, after),
            nn.ReLU(),
        )
        for place, (before, after) in enumerate(zip(widths, WIDTHS, strict=False))
    ]
    return nn.Sequential(
        OrderedDict(
            layers=nn.Sequential(*layers),
            mean=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            classifier=nn.Linear(WIDTHS[-1], classes),
        )
    )
