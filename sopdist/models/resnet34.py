"""ResNet-34 for images of 32 x 32: the first layer is a 3 x 3 convolution that keeps the size, and nothing is pooled.

The paper's network for SOP on CIFAR. For photographs take timm's, which begins with 7 x 7, stride 2 and a pooling.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from .residual import residual_network

WIDTHS = (64,) * 3 + (128,) * 4 + (256,) * 6 + (512,) * 3  # of the blocks


def make(channels: int, size: int, classes: int) -> nn.Module:  # noqa: ARG001 - any size will do
    """16 blocks in four stages, of which the last three begin with stride 2."""
    return residual_network(channels, WIDTHS, classes, Block)


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
