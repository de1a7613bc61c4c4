"""Epochs whose batches have several parts, such as labelled and unlabelled samples.

Each part fills its own columns of every batch with its own samples, in a random order of its own. The first part
determines the length of the epoch: each of its samples occurs once. The others are repeated, in a new order each time,
or cut to that length. The columns of the parts alternate, so that every rank gets its share of each part.

Example: part 0 has samples 0 to 3 in 2 columns, part 1 has samples 4 to 6 in 1 column. With columns of parts 0 1 0:

    batches   [2 5 0]     rank 0 of 2 reads 2, then 1; rank 1 reads 5 0, then 6 3
              [1 6 3]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .plan import NO_SAMPLE, Indices, Plan

_FIRST_STREAM = 1000  # of random numbers: far from streams with other purposes
_MAX_PARTS = 8


@dataclass(frozen=True)
class Part:
    """Samples that fill some of the columns of every batch."""

    samples: Indices | None = None  # ascending; None: all
    columns: int = 0  # of every batch; 0: train.batch


PlanPart = Callable[[Part, int], Plan]  # plans one pass over a part, with this stream of random numbers


def plan_parts(parts: Sequence[Part], plan_part: PlanPart) -> Plan:
    """The batches of an epoch. Parts without samples, other than the first, get no columns."""
    first = plan_part(parts[0], 0)
    if len(parts) == 1:
        return first
    if len(parts) > _MAX_PARTS:
        raise ValueError(f"{len(parts)} parts; at most {_MAX_PARTS} are possible")
    numbers, batches = [0], [first.batches]
    for number, part in enumerate(parts[1:], 1):
        if part.samples is None or len(part.samples):
            numbers.append(number)
            batches.append(_repeated(part, number, first.steps, plan_part))
    widths = [columns.shape[1] for columns in batches]
    part_of_column = np.repeat(numbers, widths)
    place = np.concatenate([(np.arange(width) + 0.5) / width for width in widths])
    order = np.lexsort((part_of_column, place))
    return Plan(np.concatenate(batches, axis=1)[:, order], part_of_column[order])


def _repeated(part: Part, number: int, steps: int, plan_part: PlanPart) -> NDArray[np.integer]:
    """Batches (steps, columns) from as many passes over the part as needed."""
    found: list[NDArray[np.integer]] = []
    count, width = 0, 0
    while not found or count < steps * width:
        plan = plan_part(part, _FIRST_STREAM + number + _MAX_PARTS * len(found))
        found.append(plan.batches[plan.batches != NO_SAMPLE])
        count, width = count + len(found[-1]), plan.batches.shape[1]
    return np.concatenate(found)[: steps * width].reshape(steps, width)
