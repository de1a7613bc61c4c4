"""Shared parts of the residual networks for images of 32 x 32: stem, blocks, global average pooling, classifier."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import pairwise

from torch import nn


def residual_network(
    channels: int, widths: Sequence[int], classes: int, block: Callable[[int, int], nn.Module]
) -> nn.Module:
    """Build a network with one block per width. `block` gets the previous width and its own; the stem has the first."""
    blocks = [block(before, after) for before, after in pairwise((widths[0], *widths))]
    return nn.Sequential(
        OrderedDict(
            stem=nn.Sequential(
                nn.Conv2d(channels, widths[0], 3, padding=1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()
            ),
            blocks=nn.Sequential(*blocks),
            mean=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            classifier=nn.Linear(widths[-1], classes),
        )
    )


def block_conv(before: int, after: int, kernel_size: int) -> nn.Conv2d:
    """A convolution of a block, without bias. It halves the resolution where the width grows, else keeps it."""
    stride = 1 if before == after else 2
    return nn.Conv2d(before, after, kernel_size, stride=stride, padding=kernel_size // 2, bias=False)
