"""ResNet-34 for images of 32 x 32: the first layer is a 3 x 3 convolution with stride 1, and there is no max pooling.

The paper's network for SOP on CIFAR. For photographs use timm's, which starts with a 7 x 7 convolution of stride 2 and
max pooling.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from .residual import block_conv, residual_network

WIDTHS = (64,) * 3 + (128,) * 4 + (256,) * 6 + (512,) * 3  # of the blocks


def make(channels: int, size: int, classes: int) -> nn.Module:  # noqa: ARG001 - works for any size
    """16 blocks in four stages, the last three of which start with stride 2."""
    return residual_network(channels, WIDTHS, classes, Block)


class Block(nn.Module):
    """Two 3 x 3 convolutions with a shortcut. Where the width grows, the resolution is halved."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.conv1 = block_conv(before, after, 3)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = block_conv(after, after, 3)
        self.norm2 = nn.BatchNorm2d(after)
        self.shortcut: nn.Module = nn.Identity()
        if before != after:
            self.shortcut = nn.Sequential(block_conv(before, after, 1), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        """(B, before, H, W) -> (B, after, H, W), or half of H and W."""
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))
