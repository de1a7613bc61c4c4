"""One pass over the logits on the GPU: loss, gradient of the logits, predicted class, pull on u.

One program per sample. Up to ONE_TILE classes, the logits of a sample are read once and stay in registers. With more
classes (ImageNet-21k has 22,000), they are read three times in tiles, from the cache. The arithmetic is float32 for
every dtype of the logits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..rows import RowBlock
from .facts import DROPPED, LARGEST_AGREEMENT, SMALLEST_TARGET, Facts, LossResult

ONE_TILE = 4096
_TILE = 2048
_DROPPED = tl.constexpr(DROPPED)
_SMALLEST_TARGET = tl.constexpr(SMALLEST_TARGET)
_LARGEST_AGREEMENT = tl.constexpr(LARGEST_AGREEMENT)


@triton.jit
def _squares(v_ptr, class_ptr, row, cols, mask, K, M: tl.constexpr, SLOTS: tl.constexpr):
    """min(v^2, 1) of columns of one row; 0 for entries that slots do not store (see `reference_loss._dense_v`)."""
    if SLOTS:
        q = tl.zeros_like(cols).to(tl.float32)
        for slot in tl.static_range(M):
            class_ = tl.load(class_ptr + row * M + slot).to(tl.int32)
            v = tl.load(v_ptr + row * M + slot)
            q = tl.where(cols == class_, tl.minimum(v * v, 1.0), q)
    else:
        v = tl.load(v_ptr + row * K + cols, mask=mask, other=0.0)
        q = tl.minimum(v * v, 1.0)
    return q


@triton.jit
def _p_and_w(z, cols, y, w_y, top, denominator, v_ptr, class_ptr, row, K, M: tl.constexpr, SLOTS: tl.constexpr):
    """Probabilities p, and w = p + s, of some columns of one row."""
    p = tl.exp(z - top) / denominator
    w = tl.where(cols == y, w_y, p - _squares(v_ptr, class_ptr, row, cols, cols < K, K, M, SLOTS))
    return p, w


@triton.jit
def loss_kernel(
    logits_ptr,  # (B, K), with a row stride of `logits_stride`
    labels_ptr,  # (B,) int64
    index_ptr,  # (B,) int64: the table row of each sample
    keep_ptr,  # (B,) uint8: 0 = drop
    u_ptr,  # (R,)
    v_ptr,  # (R, K) or (R, M)
    class_ptr,  # (R, M) for slots
    losses_ptr,  # (B,) float32
    gradient_ptr,  # (B, K) float32, without the factor `scale`
    scale_ptr,  # (B,) float32
    predicted_ptr,  # (B,) int64
    cross_entropy_ptr,  # (B,) float32
    margin_ptr,  # (B,) float32
    pull_ptr,  # (B,) float32
    fit_ptr,  # (B,) float32
    logits_stride,
    K,
    eps,
    target,
    M: tl.constexpr,
    SLOTS: tl.constexpr,
    RECLIP: tl.constexpr,
    TARGET: tl.constexpr,  # target > 0
    BLOCK: tl.constexpr,
    ONE_BLOCK: tl.constexpr,  # all classes fit in one block
):
    """Loss, gradient and facts of sample `program_id(0)`."""
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(index_ptr + i)
    y = tl.load(labels_ptr + i).to(tl.int32)
    z_base = logits_ptr + i * logits_stride
    z_y = tl.load(z_base + y).to(tl.float32)
    lanes = tl.arange(0, BLOCK)
    if ONE_BLOCK:
        z = tl.load(z_base + lanes, mask=lanes < K, other=float("-inf")).to(tl.float32)

    # 1. The strongest rival of the label (the lowest class on ties), the sums of exponentials and of logits.
    rival = -1
    z_rival = float("-inf")
    sum_z = 0.0
    top = z_y
    denominator = 0.0
    for start in range(0, K, BLOCK):
        cols = start + lanes
        if not ONE_BLOCK:
            z = tl.load(z_base + cols, mask=cols < K, other=float("-inf")).to(tl.float32)
        best, where = tl.max(
            tl.where(cols == y, float("-inf"), z), axis=0, return_indices=True, return_indices_tie_break_left=True
        )
        rival = tl.where(best > z_rival, start + where, rival)
        z_rival = tl.maximum(z_rival, best)
        new_top = tl.maximum(top, z_rival)
        denominator = denominator * tl.exp(top - new_top) + tl.sum(tl.exp(z - new_top), axis=0)
        top = new_top
        sum_z += tl.sum(tl.where(cols < K, z, 0.0), axis=0)
    finite = (tl.abs(sum_z) < float("inf")) & (top - z_y < float("inf"))  # a NaN or infinity spreads to the sum
    ok = finite & (tl.load(keep_ptr + i) != 0)
    predicted = tl.where((z_y > z_rival) | ((z_y == z_rival) & (y < rival)), y, rival)

    # 2. S = sum of max(w, eps), and the total probability of the classes that are not clipped.
    p_y = tl.exp(z_y - top) / denominator
    p_rival = tl.exp(z_rival - top) / denominator
    tl.store(predicted_ptr + i, tl.where(ok, predicted, _DROPPED))  # now, so that no register has to keep them
    tl.store(cross_entropy_ptr + i, tl.where(ok, (top - z_y) + tl.log(denominator), 0.0))
    tl.store(margin_ptr + i, tl.where(ok, p_y - p_rival, 0.0))
    tl.store(fit_ptr + i, tl.where(ok, p_y, 0.0))
    u = tl.load(u_ptr + row)
    w_y = p_y + tl.minimum(u * u, 1.0)
    if ONE_BLOCK:
        p, w = _p_and_w(z, lanes, y, w_y, top, denominator, v_ptr, class_ptr, row, K, M, SLOTS)
    total = 0.0
    p_live = 0.0
    t_y = 1.0 - tl.minimum(u * u, 1.0)
    agreement = p_y * t_y
    for start in range(0, K, BLOCK):
        cols = start + lanes
        if not ONE_BLOCK:
            z = tl.load(z_base + cols, mask=cols < K, other=float("-inf")).to(tl.float32)
            p, w = _p_and_w(z, cols, y, w_y, top, denominator, v_ptr, class_ptr, row, K, M, SLOTS)
        total += tl.sum(tl.where(cols < K, tl.maximum(w, eps), 0.0), axis=0)
        p_live += tl.sum(tl.where((cols < K) & (w > eps), p, 0.0), axis=0)
        if TARGET:
            square = _squares(v_ptr, class_ptr, row, cols, cols < K, K, M, SLOTS)
            other = (cols < K) & (cols != y) & (square > _SMALLEST_TARGET)
            agreement += tl.sum(tl.where(other, p * square, 0.0), axis=0)

    # 3. S dloss/dz_k = p_k ([w_k > eps] - mean) - [k = y, w_y > eps] S p_y/c_y
    c_y = tl.maximum(w_y, eps)
    live_y = w_y > eps
    loss = tl.log(total) - tl.log(c_y)
    own = tl.where(live_y, total / c_y * p_y, 0.0)
    mean = p_live - own
    pull = tl.where(live_y, 1.0 / c_y - 1.0 / total, 0.0)
    factor = 0.0
    if TARGET:
        loss += target * tl.log(1.0 - tl.minimum(agreement, _LARGEST_AGREEMENT))
        factor = tl.where(agreement < _LARGEST_AGREEMENT, -target * total / (1.0 - agreement), 0.0)
    moves = ok
    if RECLIP:
        clipped = c_y / total < eps
        loss = tl.where(clipped, -tl.log(eps), loss)
        pull = tl.where(clipped, 0.0, pull)
        moves = ok & (clipped == 0)
    for start in range(0, K, BLOCK):
        cols = start + lanes
        if not ONE_BLOCK:
            z = tl.load(z_base + cols, mask=cols < K, other=float("-inf")).to(tl.float32)
            p, w = _p_and_w(z, cols, y, w_y, top, denominator, v_ptr, class_ptr, row, K, M, SLOTS)
        gradient = p * (tl.where(w > eps, 1.0, 0.0) - mean) - tl.where(cols == y, own, 0.0)
        if TARGET:
            square = _squares(v_ptr, class_ptr, row, cols, cols < K, K, M, SLOTS)
            t = tl.where(cols == y, t_y, tl.where(square > _SMALLEST_TARGET, square, 0.0))
            gradient += factor * p * (t - agreement)
        tl.store(gradient_ptr + i * K + cols, tl.where(moves, gradient, 0.0), mask=cols < K)

    tl.store(losses_ptr + i, tl.where(ok, loss, 0.0))
    tl.store(scale_ptr + i, tl.where(ok, 1.0 / total, 0.0))
    tl.store(pull_ptr + i, tl.where(ok, pull, 0.0))


def launch_shape(num_classes: int) -> tuple[int, int]:
    """Block size and warps: 8 logits per thread, or 4 in blocks over 1,024, so that no registers spill."""
    block = max(128, triton.next_power_of_2(num_classes)) if num_classes <= ONE_TILE else _TILE
    return block, max(1, block // (128 if block > 1024 else 256))


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
    """See `reference.fused_loss`."""
    batch, classes = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    labels, index = labels.contiguous(), index.contiguous()
    device = logits.device
    floats = {"dtype": torch.float32, "device": device}
    losses, scale, cross_entropy, margin, pull, fit = (torch.empty(batch, **floats) for _ in range(6))
    predicted = torch.empty(batch, dtype=torch.int64, device=device)
    gradient = torch.empty(batch, classes, **floats)
    kept = torch.ones(batch, dtype=torch.uint8, device=device) if keep is None else keep.to(torch.uint8).contiguous()
    size, warps = launch_shape(classes)
    with torch.cuda.device_of(logits):  # Triton launches on the current device
        loss_kernel[(batch,)](
            logits, labels, index, kept,
            block.u, block.v, block.v if block.classes is None else block.classes,
            losses, gradient, scale, predicted, cross_entropy, margin, pull, fit,
            logits.stride(0), classes, eps, target,
            M=block.v.shape[1] if block.classes is not None else 1, SLOTS=block.classes is not None, RECLIP=reclip,
            TARGET=target > 0, BLOCK=size, ONE_BLOCK=classes <= size, num_warps=warps, enable_fp_fusion=True,
        )  # fmt: skip
    return LossResult(losses, gradient, scale, Facts(predicted, cross_entropy, margin, pull, fit))
