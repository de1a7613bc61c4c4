"""A multilayer perceptron with two hidden layers, for digits and Fashion-MNIST."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

WIDTH = 256


def make(channels: int, size: int, classes: int) -> nn.Module:
    """Pixels - 256 - 256 - classes, with BatchNorm and ReLU after the hidden layers."""
    return nn.Sequential(
        OrderedDict(
            flatten=nn.Flatten(),
            hidden1=nn.Linear(channels * size * size, WIDTH, bias=False),
            norm1=nn.BatchNorm1d(WIDTH),
            relu1=nn.ReLU(),
            hidden2=nn.Linear(WIDTH, WIDTH, bias=False),
            norm2=nn.BatchNorm1d(WIDTH),
            relu2=nn.ReLU(),
            classifier=nn.Linear(WIDTH, classes),
        )
    )
