"""The fused loss in plain PyTorch: runs on any device, and is the reference for the compiled kernels."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..rows import RowBlock
from .facts import DROPPED, LARGEST_AGREEMENT, SMALLEST_TARGET, Facts, LossResult


def fused_loss(
    logits: Tensor,
    labels: Tensor,
    index: Tensor,
    block: RowBlock,
    keep: Tensor | None,
    *,
    eps: float,
    reclip: bool,
    target: float,
) -> LossResult:
    """Compute loss, gradient of the logits and facts of a batch.

    `index` (B,) is the row of `block` of each sample; labels and index are int64 and in range. Samples with `keep`
    False, or with a logit that is not finite, get loss 0, gradient 0 and `predicted` DROPPED. `reclip` clips phi to eps
    again after normalising, as the authors' code does.

        w = p + s,   c = max(w, eps),   S = sum c,   loss = log S - log c_y
        dloss/dw_k = [w_k > eps] (1/S - [k = y] / c_y)
        dloss/dz   = p (dloss/dw - sum_j p_j dloss/dw_j)

    `target` is the weight of a second term, which pulls the prediction towards what the row says: the label, as far as
    the noise term has not absorbed it, and the class in whose favour it has.

        t = 1 - u^2 at y, v_k^2 at every other class k       a = <p, t>
        term = target log(1 - a)       dterm/dz = -target / (1 - a) p (t - a)
    """
    z = logits if logits.dtype == torch.float64 else logits.to(torch.float32)  # (B, K)
    y = labels[:, None]

    # 1. The label and its strongest rival. The prediction uses the logits: softmax may round two values to the same.
    z_y = z.gather(1, y)[:, 0]
    z_rival, rival = z.scatter(1, y, -torch.inf).max(dim=1)
    predicted = torch.where((z_y > z_rival) | ((z_y == z_rival) & (labels < rival)), labels, rival)
    top = torch.maximum(z_y, z_rival)
    ok = (z.sum(dim=1).abs() < torch.inf) & (top - z_y < torch.inf)  # a NaN or infinity makes the sum NaN or infinite
    if keep is not None:
        ok &= keep

    # 2. w = p + s
    p = z.softmax(dim=1)
    p_y, p_rival = p.gather(1, y)[:, 0], p.gather(1, rival[:, None])[:, 0]
    u, v = block.u[index].to(z.dtype), _dense_v(block, index, z.shape[1]).to(z.dtype)
    w_y = p_y + u.square().clamp_max(1)
    w = (p - v.square().clamp_max(1)).scatter(1, y, w_y[:, None])

    # 3. S dloss/dz_k = p_k ([w_k > eps] - mean) - [k = y, w_y > eps] S p_y/c_y
    live, live_y = (w > eps).to(z.dtype), (w_y > eps).to(z.dtype)
    total, c_y = w.clamp_min(eps).sum(dim=1), w_y.clamp_min(eps)
    own = total / c_y * p_y * live_y
    mean = (p * live).sum(dim=1) - own
    gradient = (p * (live - mean[:, None])).scatter_add(1, y, -own[:, None])
    scale = 1 / total
    losses = (total / c_y).log()
    pull = (1 / c_y - scale) * live_y

    # 4. The target term; the gradient is multiplied by `scale` = 1/S later.
    if target:
        square = v.square().clamp_max(1)
        t = square.where(square > SMALLEST_TARGET, 0).scatter(1, y, (1 - u.square().clamp_max(1))[:, None])
        agreement = (p * t).sum(dim=1)
        moves = (agreement < LARGEST_AGREEMENT).to(z.dtype)
        losses = losses + target * (1 - agreement.clamp_max(LARGEST_AGREEMENT)).log()
        factor = -target * total * moves / (1 - agreement.clamp_max(LARGEST_AGREEMENT))
        gradient = gradient + factor[:, None] * p * (t - agreement[:, None])

    if reclip:
        beyond = c_y * scale < eps
        losses, pull = losses.masked_fill(beyond, -math.log(eps)), pull.masked_fill(beyond, 0)
        gradient = gradient.masked_fill(beyond[:, None], 0)
    cross_entropy = z.logsumexp(dim=1) - z_y
    measured = (x.where(ok, 0).to(torch.float32) for x in (cross_entropy, p_y - p_rival, pull, p_y))
    return LossResult(
        losses.where(ok, 0),
        gradient.where(ok[:, None], 0),
        scale.where(ok, 0),
        Facts(predicted.where(ok, DROPPED), *measured),
    )


def _dense_v(block: RowBlock, index: Tensor, num_classes: int) -> Tensor:
    """v of all classes, (B, K), with 0 for the entries that slots do not store.

    Those have their initial value: v^2 < 4e-15, far below half a unit in the last place of any p >= eps. Subtracting it
    changes no bit of a value that is not clipped at eps, so slots still equal dense.
    """
    if block.classes is None:
        return block.v[index]
    classes = block.classes[index].to(torch.int64)  # (B, M)
    # The last column receives the free slots.
    out = torch.zeros(len(index), num_classes + 1, dtype=block.v.dtype, device=block.v.device)
    return out.scatter(1, classes.where(classes >= 0, num_classes), block.v[index])[:, :num_classes]
