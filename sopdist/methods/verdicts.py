"""A sample table for methods that judge samples during training: a score, the predicted class, and the visits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..sample_table import SampleTable, SharedTable
from .method import Readout, Setup, TableCost

_FORMAT = 1
ROW_BYTES = 4 + 4 + 4


class VerdictTable(SampleTable):
    """Row i: a moving average of the scores of sample i, its class as last predicted, and how often it was visited."""

    sent = ("visits",)  # owners need only the facts, but the exchange needs a column

    score: Tensor  # (rows,) float32
    predicted: Tensor  # (rows,) int32
    visits: Tensor  # (rows,) int32

    def __init__(self, setup: Setup, *, first: int, stride: int, keep: float = 0.0) -> None:
        """`keep`: how much of the old score remains after a visit; 0: only the last visit counts."""
        super().__init__(setup.samples, setup.classes, first=first, stride=stride)
        self.keep = keep
        self.register_buffer("score", torch.zeros(len(self), device=setup.device))
        for name in ("predicted", "visits"):
            self.register_buffer(name, torch.zeros(len(self), dtype=torch.int32, device=setup.device))
        self.register_meta(_FORMAT, device=setup.device)

    def update(self, rows: Tensor, facts: Sequence[Tensor]) -> None:
        """Apply facts (score, predicted class, whether the visit counts) to rows that this rank owns."""
        score, predicted, counts = facts
        rows, score, predicted = rows[counts], score[counts], predicted[counts]
        old = torch.where(self.visits[rows] > 0, self.score[rows], score)
        self.score[rows] = self.keep * old + (1 - self.keep) * score
        self.predicted[rows] = predicted
        self.visits[rows] += 1


def give_verdicts(shared: SharedTable, index: Tensor, score: Tensor, predicted: Tensor, counts: Tensor) -> None:
    """Send scores and predicted classes (B,) of samples to the owners of their rows. Call it once per step."""
    table = shared.table
    assert isinstance(table, VerdictTable)
    shared.rows(index)  # determines the route of the batch
    shared.give(index, [score.detach().float(), predicted.to(torch.int32), counts], table.update)


def read_verdicts(shared: SharedTable, labels: Tensor, threshold: float, *, inclusive: bool = False) -> Readout:
    """Flags scores above `threshold`, with `inclusive` also at it, and proposes the predicted classes. Collective."""
    table = shared.table
    assert isinstance(table, VerdictTable)
    shared.flush()
    score, predicted, visits = (shared.gather(column) for column in (table.score, table.predicted, table.visits))
    visited = visits > 0
    flags = visited & ((score >= threshold) if inclusive else (score > threshold))
    proposed = torch.where(flags, predicted.to(labels.dtype), labels)
    scores = score.where(visited, -torch.inf)
    return Readout(scores.cpu().numpy(), flags.cpu().numpy(), proposed.cpu().numpy(), visited.cpu().numpy())


def verdict_cost(name: str) -> TableCost:
    """The cost of a `VerdictTable`."""
    facts = 4 + 4 + 1
    return TableCost(name, "dense", ROW_BYTES, sent_bytes=4, returned_bytes=facts, dense_bytes=4 + facts)
