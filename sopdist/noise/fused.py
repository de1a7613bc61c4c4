"""Autograd function of the fused loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .kernels import LossResult
from .rows import RowBlock


class FusedLoss(torch.autograd.Function):
    """Computes the loss and the gradient of the logits in one kernel. Backward only scales the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        index: Tensor,
        block: RowBlock,
        keep: Tensor | None,
        eps: float,
        reclip: bool,
        target: float,
        kernels: Any,
    ) -> tuple[Tensor, ...]:
        """Return the loss of each sample (B,), and the columns of its facts."""
        result: LossResult = kernels.fused_loss(
            logits, labels, index, block, keep, eps=eps, reclip=reclip, target=target
        )
        ctx.save_for_backward(result.gradient, result.scale)
        ctx.dtype = logits.dtype
        ctx.mark_non_differentiable(*result.facts)
        return result.losses, *result.facts

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the logits."""
        gradient, scale = ctx.saved_tensors
        # Scale in float32 before rounding to the logits' type: under loss scaling, float16 would underflow otherwise.
        return (gradient * (grad * scale)[:, None]).to(ctx.dtype), *(None,) * 8
