"""The update of the visited rows: any device, and the oracle for the Triton kernels.

Only additions, multiplications, divisions and square roots, each an operation of its own, so that every device rounds
them alike: given equal facts, the Triton kernels end with the same bits.

A batch is a few hundred numbers, so what costs time on a CPU is the call, not the arithmetic. Hence the array code
below is written once for both libraries: NumPy on the CPU, on the table's own memory, with a third of torch's cost a
call, and torch elsewhere. NumPy's square root is also the correctly rounded one (see `rounding`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..counter import initial_v
from ..rates import Step
from ..rows import NoiseTable
from .facts import DROPPED, Facts

Array = Any  # numpy.ndarray or Tensor


def update_rows(table: NoiseTable, index: Tensor, labels: Tensor, facts: Facts, step: Step) -> None:
    """Visit row `index` of each sample with its facts, in place; an index that comes twice twice, in batch order."""
    for part in _rounds(index, facts.predicted):
        rows, label, *seen = (x if part is None else x[part] for x in (index, labels, *facts))
        _visit(table, rows, label, Facts(*seen), step)


def _rounds(index: Tensor, predicted: Tensor) -> Iterator[Tensor | None]:
    """Batch positions in rounds: no row twice in a round, a row's n-th visit in round n; dropped samples in none.

    None stands for the whole batch, which is what nearly every step gets.
    """
    if int(predicted.min()) != DROPPED and len(set(index.tolist())) == len(index):
        yield None
        return
    kept = (predicted != DROPPED).nonzero()[:, 0]
    ordered, order = index[kept].sort(stable=True)
    order = kept[order]
    place = torch.arange(len(ordered), device=index.device)
    new = torch.ones_like(ordered, dtype=torch.bool)
    new[1:] = ordered[1:] != ordered[:-1]
    visit = place - torch.where(new, place, 0).cummax(0).values  # 0 for the first of a run, then 1, 2, ...
    for number in range(int(visit.max()) + 1 if len(visit) else 0):
        yield order[visit == number]


def _visit(table: NoiseTable, rows: Tensor, labels: Tensor, facts: Facts, step: Step) -> None:
    """One visit of distinct rows."""
    xp, view = (np, Tensor.numpy) if table.u.device.type == "cpu" else (torch, lambda tensor: tensor)
    at, label, predicted, loss, margin, pull = (view(x) for x in (rows, labels, *facts))
    u, v, visits, mean_loss, mean_margin = (
        view(x) for x in (table.u, table.v, table.visits, table.mean_loss, table.mean_margin)
    )
    wrong = predicted != label

    u[at] = _next_u(xp, u[at], wrong, pull, step)
    visits[at] += 1
    for mean, value in ((mean_loss, loss), (mean_margin, margin)):
        old = mean[at]
        # The count is at most 2^24 visits, so it is exact in float32.
        mean[at] = old + (value - old) / xp.asarray(visits[at], dtype=xp.float32)

    old = v[at]  # (b, K or M)
    if table.classes is None:
        everyone = xp.arange(len(at))
        new = _advance(xp, old, False, step)
        new[everyone, predicted] = _advance(xp, old[everyone, predicted], True, step)
        new[everyone, label] = old[everyone, label]  # the label's own entry never moves
        v[at] = new
        return

    assert table.evictions is not None
    assert table.evicted is not None
    classes, evictions, evicted = (view(x) for x in (table.classes, table.evictions, table.evicted))
    held = classes[at]  # (b, M)
    hit = held == predicted[:, None]
    new = xp.where(held == label[:, None], old, _advance(xp, old, hit, step))  # a free slot holds 0, and stays 0
    v[at] = new

    # A class predicted for the first time takes the first free slot, or that of the smallest |v|.
    newcomer = wrong & ~hit.any(axis=1)
    if newcomer.any():
        who, class_, v_who, held_who = at[newcomer], predicted[newcomer], new[newcomer], held[newcomer]
        place = xp.where(held_who < 0, -1, abs(v_who)).argmin(axis=1)
        everyone = xp.arange(len(who))
        full = held_who[everyone, place] >= 0
        lost = v_who[everyone, place]
        evictions[who] += full
        evicted[who] = xp.maximum(evicted[who], lost * lost * full)
        classes[who, place] = xp.asarray(class_, dtype=classes.dtype)
        start = initial_v(table.seed, table.samples_of(torch.as_tensor(who)), torch.as_tensor(class_))
        v[who, place] = _advance(xp, view(start), True, step)


def _advance(xp: Any, x: Array, h: Array | bool, step: Step) -> Array:
    """Entries of v after a visit; h: whether the network contradicts the label there, one for all or one each."""
    if not isinstance(h, bool):
        return xp.where(h, _advance(xp, x, True, step), _advance(xp, x, False, step))
    q = x * x
    if step.rule == "flow":
        return xp.copysign(xp.sqrt(q / (q + (1 - q) * step.u if h else 1 + q * step.v)), x)
    return _euler(xp, x, q, x + (x * step.v) * (1 - q if h else -q), step)


def _next_u(xp: Any, u: Array, wrong: Array, pull: Array, step: Step) -> Array:
    if step.rule == "flow":
        return _advance(xp, u, wrong, step)
    q = u * u
    if step.rule == "official":
        pull = pull - 2 * xp.where(wrong, q - 1, q)
    return _euler(xp, u, q, u + (u * step.u) * pull, step)


def _euler(xp: Any, x: Array, q: Array, new: Array, step: Step) -> Array:
    """Paper: project onto [-1, 1]. Official: an entry whose square is past 1 gets no gradient."""
    return new.clip(-1, 1) if step.rule == "paper" else xp.where(q > 1, x, new)
