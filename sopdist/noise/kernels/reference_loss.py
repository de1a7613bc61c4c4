"""One pass over a batch of logits in plain PyTorch: any device, and the oracle for the Triton kernel."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..rows import RowBlock
from .facts import DROPPED, Facts, LossResult


def fused_loss(
    logits: Tensor, labels: Tensor, index: Tensor, block: RowBlock, keep: Tensor | None, *, eps: float, reclip: bool
) -> LossResult:
    """Loss, gradient of the logits and facts of a batch.

    `index` (B,) says which row of `block` belongs to each sample; labels and index are int64 and in range. Samples with
    `keep` False, or with a logit that is not finite, get loss 0, gradient 0 and the fact DROPPED. `reclip` clips phi to
    eps once more after normalising, as the authors' code does.

        w = p + s,   c = max(w, eps),   S = sum c,   loss = log S - log c_y
        dloss/dw_k = [w_k > eps] (1/S - [k = y] / c_y)
        dloss/dz   = p (dloss/dw - sum_j p_j dloss/dw_j)
    """
    z = logits if logits.dtype == torch.float64 else logits.to(torch.float32)  # (B, K)
    y = labels[:, None]

    # 1. The prediction comes from the logits: the softmax may round two of them to one value.
    predicted = _argmax(z)
    pair = torch.stack((labels, predicted), dim=1)  # (B, 2)
    z_y, top = z.gather(1, pair).unbind(1)
    ok = z.sum(dim=1).abs_() < torch.inf  # one NaN or infinity makes the sum one
    if keep is not None:
        ok &= keep

    # 2. p, and its largest value beside the label's.
    p = z.softmax(dim=1)
    p_y, p_top = p.gather(1, pair).unbind(1)
    p_rival = p.scatter_(1, y, -1).amax(dim=1)
    p.scatter_(1, y, p_y[:, None])

    # 3. w = p + s: c = max(w, eps) and p [w > eps], (B, K) each, and their sums over the classes.
    w_y = p_y + block.u.index_select(0, index).square_().clamp_max_(1)
    c, live = _add_noise(p, y, w_y[:, None], index, block, eps)
    total, p_live = c.sum(dim=1), live.sum(dim=1)  # S, and the probability that is not clipped
    c_y = w_y.clamp_min(eps)
    losses = (total / c_y).log_()

    # 4. S dloss/dz_k = p_k ([w_k > eps] - mean) - [k = y, w_y > eps] S p_y/c_y
    live_y = (w_y > eps).to(z.dtype)
    own = total / c_y * p_y * live_y
    mean = p_live - own
    gradient = live.addcmul_(p, mean[:, None], value=-1).scatter_add_(1, y, own.neg_()[:, None])
    scale = total.reciprocal_()
    pull = (c_y.reciprocal() - scale) * live_y

    if reclip:
        beyond = c_y * scale < eps
        losses = losses.masked_fill(beyond, -math.log(eps))
        gradient.masked_fill_(beyond[:, None], 0)
        pull = pull.masked_fill(beyond, 0)
    if not bool(ok.all()):
        losses, gradient, scale = losses.where(ok, 0), gradient.where(ok[:, None], 0), scale.where(ok, 0)
        predicted = predicted.where(ok, DROPPED)
    cross_entropy = (top - z_y).sub_(p_top.log())
    measured = (x.to(torch.float32) for x in (cross_entropy, p_y - p_rival, pull))
    return LossResult(losses, gradient, scale, Facts(predicted, *measured))


def _argmax(z: Tensor) -> Tensor:
    """The column of each row's maximum, the lowest on ties; NumPy's is five times as fast as torch's on a CPU."""
    return torch.from_numpy(z.detach().numpy().argmax(1)) if z.device.type == "cpu" else z.argmax(1)


def _add_noise(p: Tensor, y: Tensor, w_y: Tensor, index: Tensor, block: RowBlock, eps: float) -> tuple[Tensor, Tensor]:
    """max(w, eps) and p [w > eps], (B, K) each, for w = w_y at the label and p - v^2 elsewhere.

    An entry that never moved has v^2 < 4e-15, far below half a unit in the last place of any p >= eps: subtracting it
    changes no bit that clipping at eps lets through. So slots may leave those entries out and still equal dense.
    """
    v2 = block.v.index_select(0, index).square_().clamp_max_(1).to(p.dtype)  # (B, K or M)
    if block.classes is None:
        w = torch.sub(p, v2, out=v2).scatter_(1, y, w_y)
        live = torch.ops.aten.threshold_backward(p, w, eps)  # p where w > eps, else 0, in one pass
        return w.clamp_min_(eps), live
    # Only these columns have a w of their own: the label's, and those in a slot. A free slot stands for the label, too.
    classes = block.classes.index_select(0, index).to(torch.int64)  # (B, M)
    columns = torch.cat((y, torch.where((classes < 0) | (classes == y), y, classes)), dim=1)  # (B, 1 + M)
    p_there = p.gather(1, columns)
    w_there = torch.where(columns == y, w_y, p_there - F.pad(v2, (1, 0)))
    c = p.clamp_min(eps).scatter_(1, columns, w_there.clamp_min(eps))
    live = F.threshold(p, eps, 0).scatter_(1, columns, p_there * (w_there > eps))
    return c, live
