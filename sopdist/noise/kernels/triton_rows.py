"""The update of the visited rows on the GPU: u, v and the running means, in one pass.

Every operation rounds as IEEE 754 says (`div_rn`, `sqrt_rn`, no fused multiply-add), in the order of the reference, so
a row has the same bits on a CPU and on a GPU.

Duplicate indices need no sorting and no atomics: the program of the first sample with a given row applies all visits of
that row, in batch order. The programs of later samples with that row do nothing.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..rates import RULES, Step
from ..rows import NoiseTable
from .facts import DROPPED, Facts
from .triton_counter import initial_v

FLOW, PAPER, OFFICIAL, VOTES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
MAX_SCAN = 1024  # entries of the batch's index searched at a time
_DROPPED = tl.constexpr(DROPPED)


@triton.jit
def _next_visit(index_ptr, row, after, B, SCAN: tl.constexpr):
    """Return the first position after `after` whose sample has this row, or B."""
    found = B
    start = after + 1
    while (start < B) & (found == B):
        at = start + tl.arange(0, SCAN)
        same = tl.load(index_ptr + at, mask=at < B, other=-1) == row
        found = tl.min(tl.where(same, at, B), axis=0)
        start += SCAN
    return found


@triton.jit
def _signed_root(q, x):
    return tl.where(x < 0, -tl.sqrt_rn(q), tl.sqrt_rn(q))


@triton.jit
def _euler(x, q, new, RULE: tl.constexpr):
    """Paper: project onto [-1, 1]. Official: an entry whose square exceeds 1 gets no gradient."""
    if RULE == PAPER:
        return tl.minimum(tl.maximum(new, -1.0), 1.0)
    else:  # noqa: RET505 - a compile-time branch
        return tl.where(q > 1.0, x, new)


@triton.jit
def _advance(x, h, vote, rate_v, rate_u, RULE: tl.constexpr):
    """Return entries of v after a visit; h: whether the network contradicts the label there, and by what margin."""
    q = x * x
    if RULE == VOTES:
        return tl.where(h, x + vote, x)
    elif RULE == FLOW:  # noqa: RET505
        return _signed_root(tl.math.div_rn(q, tl.where(h, q + (1.0 - q) * rate_u, 1.0 + q * rate_v)), x)
    else:
        return _euler(x, q, x + (x * rate_v) * tl.where(h, 1.0 - q, -q), RULE)


@triton.jit
def _next_u(u, wrong, margin, pull, rate_v, rate_u, RULE: tl.constexpr):
    if RULE == VOTES:
        return tl.where(wrong, u, u + margin)
    elif RULE == FLOW:  # noqa: RET505
        return _advance(u, wrong, margin, rate_v, rate_u, RULE)
    else:
        q = u * u
        if RULE == OFFICIAL:
            pull = pull - 2.0 * tl.where(wrong, q - 1.0, q)
        return _euler(u, q, u + (u * rate_u) * pull, RULE)


@triton.jit
def _visit_scalars(
    first, row, u_ptr, mean_loss_ptr, mean_margin_ptr, mean_fit_ptr, visits_ptr,
    index_ptr, labels_ptr, predicted_ptr, loss_ptr, margin_ptr, pull_ptr, fit_ptr,
    B, rate_v, rate_u, RULE: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """Apply all visits of one row to its u and running means."""
    u = tl.load(u_ptr + row)
    mean_loss = tl.load(mean_loss_ptr + row)
    mean_margin = tl.load(mean_margin_ptr + row)
    mean_fit = tl.load(mean_fit_ptr + row)
    visits = tl.load(visits_ptr + row)
    at = first
    while at < B:
        predicted = tl.load(predicted_ptr + at).to(tl.int32)
        if predicted != _DROPPED:
            visits += 1
            count = visits.to(tl.float32)
            mean_loss += tl.math.div_rn(tl.load(loss_ptr + at) - mean_loss, count)
            margin = tl.load(margin_ptr + at)
            mean_margin += tl.math.div_rn(margin - mean_margin, count)
            mean_fit += tl.math.div_rn(tl.load(fit_ptr + at) - mean_fit, count)
            wrong = predicted != tl.load(labels_ptr + at).to(tl.int32)
            u = _next_u(u, wrong, margin, tl.load(pull_ptr + at), rate_v, rate_u, RULE)
        at = _next_visit(index_ptr, row, at, B, SCAN)
    tl.store(u_ptr + row, u)
    tl.store(mean_loss_ptr + row, mean_loss)
    tl.store(mean_margin_ptr + row, mean_margin)
    tl.store(mean_fit_ptr + row, mean_fit)
    tl.store(visits_ptr + row, visits)


@triton.jit
def dense_rows_kernel(
    u_ptr, v_ptr, mean_loss_ptr, mean_margin_ptr, mean_fit_ptr, visits_ptr,  # the table, (R,) and (R, K)
    index_ptr, labels_ptr, predicted_ptr, loss_ptr, margin_ptr, pull_ptr, fit_ptr,  # the batch, (B,) each
    B, K, rate_v, rate_u, RULE: tl.constexpr, BLOCK: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """Program (i, t) updates columns t * BLOCK ... of the row of sample i."""
    i = tl.program_id(0)
    row = tl.load(index_ptr + i)
    if _next_visit(index_ptr, row, -1, B, SCAN) == i:
        if tl.program_id(1) == 0:
            _visit_scalars(
                i, row, u_ptr, mean_loss_ptr, mean_margin_ptr, mean_fit_ptr, visits_ptr,
                index_ptr, labels_ptr, predicted_ptr, loss_ptr, margin_ptr, pull_ptr, fit_ptr,
                B, rate_v, rate_u, RULE, SCAN,
            )  # fmt: skip
        cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        v = tl.load(v_ptr + row * K + cols, mask=cols < K, other=0.0)
        at = i
        while at < B:
            predicted = tl.load(predicted_ptr + at).to(tl.int32)
            label = tl.load(labels_ptr + at).to(tl.int32)
            new = _advance(v, cols == predicted, -tl.load(margin_ptr + at), rate_v, rate_u, RULE)
            v = tl.where((cols == label) | (predicted == _DROPPED), v, new)
            at = _next_visit(index_ptr, row, at, B, SCAN)
        tl.store(v_ptr + row * K + cols, v, mask=cols < K)


@triton.jit
def slots_rows_kernel(
    u_ptr, v_ptr, class_ptr, mean_loss_ptr, mean_margin_ptr, mean_fit_ptr, visits_ptr,  # the table
    evictions_ptr, evicted_ptr,
    index_ptr, labels_ptr, predicted_ptr, loss_ptr, margin_ptr, pull_ptr, fit_ptr,  # the batch, (B,) each
    B, seed, sample_first, sample_stride, rate_v, rate_u,
    RULE: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """Program i updates the M slots of the row of sample i, in a block of the next power of two."""
    i = tl.program_id(0)
    row = tl.load(index_ptr + i)
    if _next_visit(index_ptr, row, -1, B, SCAN) == i:
        _visit_scalars(
            i, row, u_ptr, mean_loss_ptr, mean_margin_ptr, mean_fit_ptr, visits_ptr,
            index_ptr, labels_ptr, predicted_ptr, loss_ptr, margin_ptr, pull_ptr, fit_ptr,
            B, rate_v, rate_u, RULE, SCAN,
        )  # fmt: skip
        slots = tl.arange(0, BLOCK)
        real = slots < M
        classes = tl.load(class_ptr + row * M + slots, mask=real, other=-2).to(tl.int32)
        v = tl.load(v_ptr + row * M + slots, mask=real, other=0.0)
        evictions = tl.load(evictions_ptr + row)
        evicted = tl.load(evicted_ptr + row)
        at = i
        while at < B:
            predicted = tl.load(predicted_ptr + at).to(tl.int32)
            label = tl.load(labels_ptr + at).to(tl.int32)
            if predicted != _DROPPED:
                hit = classes == predicted
                vote = -tl.load(margin_ptr + at)
                new = _advance(v, hit, vote, rate_v, rate_u, RULE)
                v = tl.where((classes < 0) | (classes == label), v, new)
                # Store a class predicted for the first time in the first free slot, or in place of the smallest |v|.
                if (predicted != label) & (tl.max(hit.to(tl.int32), axis=0) == 0):
                    size = tl.where(classes == -1, -1.0, tl.where(real, tl.abs(v), float("inf")))
                    smallest, slot = tl.min(size, axis=0, return_indices=True, return_indices_tie_break_left=True)
                    if smallest >= 0.0:
                        evictions += 1
                        evicted = tl.maximum(evicted, smallest * smallest)
                    start = initial_v(seed, row * sample_stride + sample_first, predicted)
                    classes = tl.where(slots == slot, predicted, classes)
                    v = tl.where(slots == slot, _advance(start, True, vote, rate_v, rate_u, RULE), v)
            at = _next_visit(index_ptr, row, at, B, SCAN)
        tl.store(class_ptr + row * M + slots, classes.to(class_ptr.dtype.element_ty), mask=real)
        tl.store(v_ptr + row * M + slots, v, mask=real)
        tl.store(evictions_ptr + row, evictions)
        tl.store(evicted_ptr + row, evicted)


def dense_launch_shape(num_classes: int) -> tuple[int, int]:
    """Columns per program, and warps."""
    block = min(1024, max(32, triton.next_power_of_2(num_classes)))
    return block, max(1, block // 512)


def update_rows(table: NoiseTable, index: Tensor, labels: Tensor, facts: Facts, step: Step) -> None:
    """See `reference.update_rows`."""
    batch = len(index)
    visits = [tensor.contiguous() for tensor in (index, labels, *facts)]
    scan = min(MAX_SCAN, triton.next_power_of_2(batch))
    options = {"RULE": RULES.index(step.rule), "SCAN": scan, "enable_fp_fusion": False}
    with torch.cuda.device_of(table.u):  # Triton launches on the current device
        if table.classes is None:
            block, warps = dense_launch_shape(table.num_classes)
            dense_rows_kernel[(batch, triton.cdiv(table.num_classes, block))](
                table.u, table.v, table.mean_loss, table.mean_margin, table.mean_fit, table.visits,
                *visits, batch, table.num_classes, step.v, step.u, BLOCK=block, num_warps=warps, **options,
            )  # fmt: skip
        else:
            slots_rows_kernel[(batch,)](
                table.u, table.v, table.classes, table.mean_loss, table.mean_margin, table.mean_fit, table.visits,
                table.evictions, table.evicted, *visits, batch, table.seed, table.first, table.stride, step.v, step.u,
                M=table.slots, BLOCK=max(2, triton.next_power_of_2(table.slots)), num_warps=1, **options,
            )  # fmt: skip
