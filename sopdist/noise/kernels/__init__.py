"""Which kernels run where: the one place that decides.

CUDA tensors go through Triton, everything else through the reference. `SOPDIST_KERNELS=reference|triton` overrides
that; Triton on CPU tensors needs its interpreter (`TRITON_INTERPRET=1`), which is slow and meant for tests.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Protocol

import torch
from torch import Tensor

from ..rates import Step
from ..rows import NoiseTable, RowBlock
from . import reference
from .facts import DROPPED, Facts, LossResult

__all__ = ["DROPPED", "Facts", "Kernels", "LossResult", "choose_kernels"]

_HAVE_TRITON = importlib.util.find_spec("triton") is not None


class Kernels(Protocol):
    """The two operations that each implementation offers; `reference` documents them."""

    def fused_loss(
        self,
        logits: Tensor,
        labels: Tensor,
        index: Tensor,
        block: RowBlock,
        keep: Tensor | None,
        *,
        eps: float,
        reclip: bool,
    ) -> LossResult:
        """Loss, gradient of the logits and facts of a batch."""

    def update_rows(self, table: NoiseTable, index: Tensor, labels: Tensor, facts: Facts, step: Step) -> None:
        """Apply the facts to the rows, in place."""


def choose_kernels(device: torch.device, dtype: torch.dtype = torch.float32) -> Kernels:
    """The kernels for tensors on this device; float64 logits, which only tests have, always take the reference."""
    wanted = os.environ.get("SOPDIST_KERNELS", "")
    if wanted not in ("", "reference", "triton"):
        raise ValueError(f"SOPDIST_KERNELS must be 'reference' or 'triton', got {wanted!r}")
    if wanted == "triton" and not _HAVE_TRITON:
        raise RuntimeError("SOPDIST_KERNELS=triton, but Triton is not installed: pip install 'sopdist[triton]'")
    if wanted == "triton" and device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("SOPDIST_KERNELS=triton on CPU tensors needs Triton's interpreter: set TRITON_INTERPRET=1")
    if dtype != torch.float64 and (wanted == "triton" or (not wanted and _HAVE_TRITON and device.type == "cuda")):
        from . import triton_kernels

        return triton_kernels
    return reference
