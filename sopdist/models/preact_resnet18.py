"""PreActResNet-18 for images of 32 x 32: normalisation and activation stand before each convolution.

The paper's network for SOP+, in the form that the literature on label noise uses since DivideMix. It is not that of He
et al.: the stem is normalised and activated, what is led around a block is the activated input, and nothing is
normalised before the mean.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from .residual import residual_network

WIDTHS = (64, 64, 128, 128, 256, 256, 512, 512)  # of the blocks


def make(channels: int, size: int, classes: int) -> nn.Module:  # noqa: ARG001 - any size will do
    """Eight blocks in four stages, of which the last three begin with stride 2."""
    return residual_network(channels, WIDTHS, classes, Block)


class Block(nn.Module):
    """Two 3 x 3 convolutions, each after BatchNorm and ReLU. Where the width grows, the size is halved."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        stride = 1 if before == after else 2
        self.norm1 = nn.BatchNorm2d(before)
        self.conv1 = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.shortcut: nn.Module = nn.Identity()
        if before != after:
            self.shortcut = nn.Conv2d(before, after, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, before, H, W) -> (B, after, H, W), or half of H and W."""
        x = F.relu(self.norm1(x))
        y = self.conv1(x)
        y = self.conv2(F.relu(self.norm2(y)))
        return y + self.shortcut(x)
