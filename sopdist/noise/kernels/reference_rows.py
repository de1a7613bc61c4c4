"""The update of the visited rows in plain PyTorch: runs on any device, and is the reference for the compiled kernels.

Uses only additions, multiplications, divisions and square roots, each as a separate operation, so that every device
rounds them the same way. Given equal facts, the compiled kernels produce the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..counter import initial_v
from ..rates import Step
from ..rounding import sqrt_rounded
from ..rows import NoiseTable
from .facts import DROPPED, Facts


def update_rows(table: NoiseTable, index: Tensor, labels: Tensor, facts: Facts, step: Step) -> None:
    """Update row `index` of each sample in place. An index that occurs twice is visited twice, in batch order."""
    for part in _rounds(index, facts.predicted):
        _visit(table, index[part], labels[part], Facts(*(fact[part] for fact in facts)), step)


def _rounds(index: Tensor, predicted: Tensor) -> Iterator[Tensor]:
    """Yield batch positions in rounds. Round n holds the n-th visit of each row. Dropped samples are in no round."""
    kept = (predicted != DROPPED).nonzero()[:, 0]
    ordered, order = index[kept].sort(stable=True)
    position = torch.arange(len(ordered), device=index.device)
    new = torch.ones_like(ordered, dtype=torch.bool)
    new[1:] = ordered[1:] != ordered[:-1]
    visit = position - torch.where(new, position, 0).cummax(0).values  # 0 for the first of a run, then 1, 2, ...
    for n in range(int(visit.max()) + 1 if len(visit) else 0):
        yield kept[order[visit == n]]


def _visit(table: NoiseTable, rows: Tensor, labels: Tensor, facts: Facts, step: Step) -> None:
    """Apply one visit to distinct rows."""
    wrong = facts.predicted != labels
    table.u[rows] = _next_u(table.u[rows], wrong, facts, step)
    table.visits[rows] += 1
    means = ((table.mean_loss, facts.loss), (table.mean_margin, facts.margin), (table.mean_fit, facts.fit))
    for mean, value in means:
        mean[rows] += (value - mean[rows]) / table.visits[rows]
    if table.classes is None:
        classes = torch.arange(table.num_classes, device=rows.device).expand(len(rows), -1)  # (b, K)
    else:
        classes = table.classes[rows].to(torch.int64)  # (b, M); -1 is a free slot: its v is 0, and stays 0
    v = table.v[rows]
    hit = classes == facts.predicted[:, None]
    vote = -facts.margin
    v = torch.where(classes == labels[:, None], v, _advance(v, hit, step, vote[:, None]))  # the label's entry stays
    table.v[rows] = v
    if table.classes is not None:
        newcomer = wrong & ~hit.any(dim=1)
        chosen = (facts.predicted[newcomer], classes[newcomer], v[newcomer], vote[newcomer])
        _admit(table, rows[newcomer], *chosen, step)


def _admit(
    table: NoiseTable, rows: Tensor, newcomer: Tensor, classes: Tensor, v: Tensor, vote: Tensor, step: Step
) -> None:
    """Store a class predicted for the first time in the first free slot, or in place of the smallest |v|."""
    assert table.classes is not None
    assert table.evictions is not None
    assert table.evicted is not None
    slot = v.abs().where(classes >= 0, -1).argmin(dim=1)
    every_row = torch.arange(len(rows), device=rows.device)
    full, lost = classes[every_row, slot] >= 0, v[every_row, slot].square()
    table.evictions[rows] += full
    table.evicted[rows] = torch.maximum(table.evicted[rows], lost.where(full, 0))
    table.classes[rows, slot] = newcomer.to(table.classes.dtype)
    start = initial_v(table.seed, table.samples_of(rows), newcomer)
    table.v[rows, slot] = _advance(start, torch.ones_like(start, dtype=torch.bool), step, vote)


def _advance(x: Tensor, h: Tensor, step: Step, vote: Tensor) -> Tensor:
    """Return entries of v after a visit; h: whether the network contradicts the label there, and by what margin."""
    if step.rule == "votes":
        return torch.where(h, x + vote, x)
    q = x * x
    if step.rule == "flow":
        return sqrt_rounded(q / torch.where(h, q + (1 - q) * step.u, 1 + q * step.v)).copysign(x)
    return _euler(x, q, x + (x * step.v) * torch.where(h, 1 - q, -q), step)


def _next_u(u: Tensor, wrong: Tensor, facts: Facts, step: Step) -> Tensor:
    if step.rule == "votes":
        return torch.where(wrong, u, u + facts.margin)
    if step.rule == "flow":
        return _advance(u, wrong, step, facts.margin)
    pull, q = facts.pull, u * u
    if step.rule == "official":
        pull = pull - 2 * torch.where(wrong, q - 1, q)
    return _euler(u, q, u + (u * step.u) * pull, step)


def _euler(x: Tensor, q: Tensor, new: Tensor, step: Step) -> Tensor:
    """Paper: project onto [-1, 1]. Official: an entry whose square exceeds 1 gets no gradient."""
    return new.clamp(-1, 1) if step.rule == "paper" else torch.where(q > 1, x, new)
