"""PreActResNet-18 for images of 32 x 32: normalisation and activation come before each convolution.

The paper's network for SOP+, in the form that the literature on label noise has used since DivideMix. It differs from
He et al.: the stem is normalised and activated, the shortcut takes the activated input of a block, and there is no
normalisation before the global average pooling.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from .residual import block_conv, residual_network

WIDTHS = (64, 64, 128, 128, 256, 256, 512, 512)  # of the blocks


def make(channels: int, size: int, classes: int) -> nn.Module:  # noqa: ARG001 - works for any size
    """Eight blocks in four stages, the last three of which start with stride 2."""
    return residual_network(channels, WIDTHS, classes, Block)


class Block(nn.Module):
    """Two 3 x 3 convolutions, each after BatchNorm and ReLU. Where the width grows, the resolution is halved."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(before)
        self.conv1 = block_conv(before, after, 3)
        self.norm2 = nn.BatchNorm2d(after)
        self.conv2 = block_conv(after, after, 3)
        self.shortcut = nn.Identity() if before == after else block_conv(before, after, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(B, before, H, W) -> (B, after, H, W), or half of H and W."""
        x = F.relu(self.norm1(x))
        y = self.conv1(x)
        y = self.conv2(F.relu(self.norm2(y)))
        return y + self.shortcut(x)
