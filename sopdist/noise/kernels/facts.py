"""Facts: the output of every loss kernel and the input of every row kernel; and their wire format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

FACT_WIRE_BYTES = 6 * 4  # label, predicted class, loss, margin, pull, fit

DROPPED = -1

# The target term ignores squares of v below this: an initial v^2 would make dense and slots differ in the last bit.
SMALLEST_TARGET = 1e-12
LARGEST_AGREEMENT = 1 - 1e-4  # of prediction and target; the target term is constant beyond it


class Facts(NamedTuple):
    """The data that updates a row after a visit, (B,) each. Its size does not depend on the number of classes."""

    predicted: Tensor  # int64: class of the largest logit, the lowest on ties; DROPPED = do not update the row
    loss: Tensor  # float32: -log p_y, the network's own cross-entropy
    margin: Tensor  # float32: p_y - the largest other p, in [-1, 1]
    pull: Tensor  # float32: 1/w_y - 1/S, or 0 where the loss is clipped; dl_CE/du = -2 u pull
    fit: Tensor  # float32: p_y


class LossResult(NamedTuple):
    """Output of one pass over the logits: losses (B,), and dloss/dlogits = gradient (B, K) x scale (B,)."""

    losses: Tensor
    gradient: Tensor
    scale: Tensor
    facts: Facts


def to_wire(labels: Tensor, facts: Facts) -> list[Tensor]:
    """Pack labels and facts into columns of 4 bytes per sample, to send to the owners of the rows."""
    return [labels.to(torch.int32), facts.predicted.to(torch.int32), *facts[1:]]


def from_wire(columns: Sequence[Tensor]) -> tuple[Tensor, Facts]:
    """Unpack the labels and facts that `to_wire` packed."""
    labels, predicted, *measured = columns
    return labels.to(torch.int64), Facts(predicted.to(torch.int64), *measured)
