"""ResNet-34 for images of 32 x 32: the first layer is a 3 x 3 convolution that keeps the size, and nothing is pooled.

The paper's network for SOP on CIFAR. For photographs take timm's, which begins with 7 x 7, stride 2 and a pooling.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional as F

BLOCKS = (3, 4, 6, 3)
WIDTHS = (64, 128, 256, 512)


def make(channels: int, size: int, classes: int) -> nn.Module:  # noqa: ARG001 - any size will do
    """Stem, 16 blocks in four stages of which the last three begin with stride 2, mean over the places, classifier."""
    widths = [width for width, count in zip(WIDTHS, BLOCKS, strict=True) for _ in range(count)]
    blocks = [Block(before, after) for before, after in pairwise((WIDTHS[0], *widths))]
    return nn.Sequential(
        OrderedDict(
            stem=nn.Sequential(
                nn.Conv2d(channels, WIDTHS[0], 3, padding=1, bias=False), nn.BatchNorm2d(WIDTHS[0]), nn.ReLU()
            ),
            blocks=nn.Sequential(*blocks),
            mean=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            classifier=nn.Linear(WIDTHS[-1], classes),
        )
    )


class Block(nn.Module):
    """Two 3 x 3 convolutions around which the input is led. Where the width grows, the size is halved."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        stride = 1 if before == after else 2
        self.conv1 = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.shortcut: nn.Module = nn.Identity()
        if before != after:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride=stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        """(B, before, H, W) -> (B, after, H, W), or half of H and W."""
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))
