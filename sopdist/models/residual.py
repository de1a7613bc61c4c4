"""What residual networks for images of 32 x 32 share: stem, blocks, mean over the places, classifier."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import pairwise

from torch import nn


def residual_network(
    channels: int, widths: Sequence[int], classes: int, block: Callable[[int, int], nn.Module]
) -> nn.Module:
    """A block for each width, made with the width before it and its own. The stem has the first one's."""
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
