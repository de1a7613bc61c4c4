"""What the two kernels hand to each other: the contract that the reference and the Triton kernels both keep."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

DROPPED = -1


class Facts(NamedTuple):
    """All that a row needs to know of a visit of its sample, (B,) each: a few bytes, whatever the number of classes."""

    predicted: Tensor  # int64: the class of the largest logit, the lowest on ties; DROPPED = leave the row alone
    loss: Tensor  # float32: -log p_y, the network's own cross-entropy
    margin: Tensor  # float32: p_y - the largest other p, in [-1, 1]
    pull: Tensor  # float32: 1/w_y - 1/S, or 0 where the loss is clipped; dl_CE/du = -2 u pull


class LossResult(NamedTuple):
    """One pass over the logits: the loss of each sample (B,), and dloss/dlogits = gradient (B, K) x scale (B,)."""

    losses: Tensor
    gradient: Tensor
    scale: Tensor
    facts: Facts
