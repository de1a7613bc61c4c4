"""The kernels in plain PyTorch: any device, and the oracle that the Triton kernels are tested against.

Row updates use only additions, multiplications, divisions and square roots, each an operation of its own, so that every
device rounds them alike: given equal facts, the Triton kernels end with the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..counter import initial_v
from ..rates import Step
from ..rounding import sqrt_rounded
from ..rows import NoiseTable, RowBlock
from .facts import DROPPED, Facts, LossResult

# -- (a) the loss ------------------------------------------------------------------------------------------------------


def fused_loss(
    logits: Tensor, labels: Tensor, index: Tensor, block: RowBlock, keep: Tensor | None, *, eps: float, reclip: bool
) -> LossResult:
    """Loss, gradient of the logits and facts of a batch.

    `index` (B,) says which row of `block` belongs to each sample; labels and index are int64 and in range. Samples
    with `keep` False, or with a logit that is not finite, get loss 0, gradient 0 and the fact DROPPED. `reclip` clips phi
    to eps once more after normalising, as the authors' code does.

        w = p + s,   c = max(w, eps),   S = sum c,   loss = log S - log c_y
        dloss/dw_k = [w_k > eps] (1/S - [k = y] / c_y)
        dloss/dz   = p (dloss/dw - sum_j p_j dloss/dw_j)
    """
    z = logits if logits.dtype == torch.float64 else logits.to(torch.float32)  # (B, K)
    y = labels[:, None]

    # 1. The label against its strongest rival: the prediction, without the rounding of the softmax in between.
    others = z.scatter(1, y, -torch.inf)
    rival = others.argmax(dim=1)
    z_y, z_rival = z.gather(1, y)[:, 0], others.gather(1, rival[:, None])[:, 0]
    predicted = torch.where((z_y > z_rival) | ((z_y == z_rival) & (labels < rival)), labels, rival)
    top = torch.maximum(z_y, z_rival)
    ok = torch.isfinite(top) & torch.isfinite(z.amin(dim=1))
    if keep is not None:
        ok &= keep

    # 2. w = p + s
    p = z.softmax(dim=1)
    p_y, p_rival = p.gather(1, y)[:, 0], p.gather(1, rival[:, None])[:, 0]
    w = _minus_v_squared(p, block, index)
    w_y = p_y + block.u[index].square().clamp_max(1)
    w.scatter_(1, y, w_y[:, None])

    # 3. The sums over the classes. threshold_backward(p, w, eps) is p where w > eps and 0 elsewhere, in one pass.
    gradient = torch.ops.aten.threshold_backward(p, w, eps)
    p_live = gradient.sum(dim=1)
    total = w.clamp_min_(eps).sum(dim=1)
    c_y, live_y = w_y.clamp_min(eps), w_y > eps
    losses = total.log() - c_y.log()

    # 4. dloss/dz_k = p_k ([w_k > eps]/S - mean) - [k = y, w_y > eps] p_y/c_y
    own = torch.where(live_y, p_y / c_y, 0)
    mean = p_live / total - own
    gradient.div_(total[:, None]).addcmul_(p, mean[:, None], value=-1).scatter_add_(1, y, -own[:, None])
    pull = torch.where(live_y, 1 / c_y - 1 / total, 0)

    if reclip:
        clipped = c_y / total < eps
        losses = torch.where(clipped, torch.full_like(losses, eps).log().neg(), losses)
        gradient = gradient.masked_fill_(clipped[:, None], 0)
        pull = pull.masked_fill(clipped, 0)
    if not bool(ok.all()):
        losses, gradient = losses.where(ok, 0), gradient.where(ok[:, None], 0)
        predicted = predicted.where(ok, DROPPED)
    cross_entropy = (top - z_y) - torch.maximum(p_y, p_rival).log()
    facts = Facts(predicted.to(torch.int32), *(x.to(torch.float32) for x in (cross_entropy, p_y - p_rival, pull)))
    return LossResult(losses, gradient, facts)


def _minus_v_squared(p: Tensor, block: RowBlock, index: Tensor) -> Tensor:
    """p - min(v^2, 1) as a new tensor; the label's own column is left to the caller.

    An entry that never moved has v^2 < 4e-15, far below half a unit in the last place of any p >= eps: subtracting it
    changes no bit that clipping at eps lets through. So slots may leave those entries out and still equal dense.
    """
    squares = block.v[index].square_().clamp_max_(1)  # (B, K or M)
    if block.classes is None:
        return torch.sub(p, squares)
    classes = block.classes[index].to(torch.int64)
    squares.masked_fill_(classes < 0, 0)
    return p.scatter_add(1, classes.clamp_min_(0), squares.neg_().to(p.dtype))


# -- (b) the rows ------------------------------------------------------------------------------------------------------


def update_rows(table: NoiseTable, index: Tensor, labels: Tensor, facts: Facts, step: Step) -> None:
    """Visit row `index` of each sample with its facts, in place. An index that comes twice is visited twice, in batch order."""
    for part in _rounds(index, facts.predicted):
        _visit(table, index[part], labels[part], Facts(*(fact[part] for fact in facts)), step)


def _rounds(index: Tensor, predicted: Tensor) -> Iterator[Tensor | slice]:
    """Batch positions in rounds: no row twice in a round, a row's n-th visit in round n; dropped samples in none."""
    positions = (predicted != DROPPED).nonzero()[:, 0]
    ordered, order = index[positions].sort(stable=True)
    new = torch.ones_like(ordered, dtype=torch.bool)
    new[1:] = ordered[1:] != ordered[:-1]
    if bool(new.all()):
        yield slice(None) if len(positions) == len(index) else positions
        return
    place = torch.arange(len(ordered), device=index.device)
    visit = place - torch.where(new, place, 0).cummax(0).values  # 0 for the first of a run, then 1, 2, ...
    for number in range(int(visit.max()) + 1):
        yield positions[order[visit == number]]


def _visit(table: NoiseTable, rows: Tensor, labels: Tensor, facts: Facts, step: Step) -> None:
    """One visit of distinct rows."""
    predicted = facts.predicted.to(torch.int64)
    wrong = predicted != labels

    u = table.u[rows]
    table.u[rows] = _next_u(u, wrong, facts.pull, step)
    visits = table.visits[rows] + 1
    for mean, value in ((table.mean_loss, facts.loss), (table.mean_margin, facts.margin)):
        old = mean[rows]
        mean[rows] = old + (value - old) / visits
    table.visits[rows] = visits

    if table.classes is None:
        old = table.v[rows]  # (b, K)
        new = _shrink(old, step)
        new.scatter_(1, predicted[:, None], _grow(old.gather(1, predicted[:, None]), step))
        new.scatter_(1, labels[:, None], old.gather(1, labels[:, None]))  # the label's own entry never moves
        table.v[rows] = new
    else:
        _visit_slots(table, rows, labels, predicted, wrong, step)


def _visit_slots(table: NoiseTable, rows: Tensor, labels: Tensor, predicted: Tensor, wrong: Tensor, step: Step) -> None:
    assert table.classes is not None and table.evictions is not None and table.evicted is not None
    classes, v = table.classes[rows].to(torch.int64), table.v[rows]  # (b, M)
    free, hit = classes < 0, classes == predicted[:, None]
    new = torch.where(hit, _grow(v, step), _shrink(v, step))
    v = torch.where(free | (classes == labels[:, None]), v, new)

    # A class predicted for the first time takes the first free slot, or that of the smallest |v|.
    newcomer = wrong & ~hit.any(dim=1)
    if bool(newcomer.any()):
        who = newcomer.nonzero()[:, 0]
        place = v[who].abs().masked_fill(free[who], -1).argmin(dim=1)
        lost = v[who, place].square()
        full = ~free[who, place]
        table.evictions[rows[who]] += full
        table.evicted[rows[who]] = torch.maximum(table.evicted[rows[who]], lost.where(full, 0))
        classes[who, place] = predicted[who]
        v[who, place] = _grow(initial_v(table.seed, table.samples_of(rows[who]), predicted[who]), step)
        table.classes[rows] = classes.to(table.classes.dtype)
    table.v[rows] = v


def _grow(x: Tensor, step: Step) -> Tensor:
    """An entry of v that the network contradicts: h = 1."""
    q = x * x
    if step.rule == "flow":
        return sqrt_rounded(q / (q + (1 - q) * step.u)).copysign(x)
    return _euler(x, q, x + (x * step.v) * (1 - q), step)


def _shrink(x: Tensor, step: Step) -> Tensor:
    """An entry of v that the network does not contradict: h = 0."""
    q = x * x
    if step.rule == "flow":
        return sqrt_rounded(q / (1 + q * step.v)).copysign(x)
    return _euler(x, q, x - (x * step.v) * q, step)


def _next_u(u: Tensor, wrong: Tensor, pull: Tensor, step: Step) -> Tensor:
    if step.rule == "flow":
        return torch.where(wrong, _grow(u, step), _shrink(u, step))
    q = u * u
    if step.rule == "official":
        pull = pull - 2 * torch.where(wrong, q - 1, q)
    return _euler(u, q, u + (u * step.u) * pull, step)


def _euler(x: Tensor, q: Tensor, new: Tensor, step: Step) -> Tensor:
    """Paper: project onto [-1, 1]. Official: an entry whose square is past 1 gets no gradient."""
    return new.clamp(-1, 1) if step.rule == "paper" else torch.where(q > 1, x, new)
