"""The nine-layer convolutional network of the Co-teaching papers, for images of 32 pixels."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

_SLOPE = 0.01  # of the leaky ReLU
_DROPOUT = 0.25


def make(channels: int, size: int, classes: int) -> nn.Module:
    """Two blocks of three padded convolutions, then three without padding; the mean over positions; classifier.

    Images of less than 28 pixels would leave nothing without padding, so that all convolutions have it.
    """
    layers = OrderedDict(
        block1=_block(channels, (128, 128, 128), padding=1),
        shrink1=nn.Sequential(nn.MaxPool2d(2), nn.Dropout2d(_DROPOUT)),
        block2=_block(128, (256, 256, 256), padding=1),
        shrink2=nn.Sequential(nn.MaxPool2d(2), nn.Dropout2d(_DROPOUT)),
        block3=_block(256, (512, 256, 128), padding=0 if size >= 28 else 1),
        mean=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
        classifier=nn.Linear(128, classes),
    )
    return nn.Sequential(layers)


def _block(before: int, widths: tuple[int, ...], *, padding: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in widths:
        layers += [nn.Conv2d(before, width, 3, padding=padding), nn.BatchNorm2d(width), nn.LeakyReLU(_SLOPE)]
        before = width
    return nn.Sequential(*layers)
