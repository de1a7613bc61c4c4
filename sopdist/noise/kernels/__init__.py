"""Selection of kernels.

CUDA tensors use Triton and CPU tensors use compiled C. If either is not available, the PyTorch reference is used.
`SOPDIST_KERNELS=reference|native|triton` overrides this. Triton on CPU tensors needs its interpreter
(`TRITON_INTERPRET=1`), which is slow and meant for tests.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Protocol

import torch
from torch import Tensor

from ..rates import Step
from ..rows import NoiseTable, RowBlock
from . import native_kernels, reference
from .facts import DROPPED, Facts, LossResult

__all__ = ["DROPPED", "Facts", "Kernels", "LossResult", "choose_kernels"]

_DEFAULTS = {
    "cpu": "native" if native_kernels.is_built() else "reference",
    "cuda": "triton" if importlib.util.find_spec("triton") is not None else "reference",
}


class Kernels(Protocol):
    """The two operations of every implementation. `reference` documents them."""

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
        target: float,
    ) -> LossResult:
        """Compute loss, gradient of the logits and facts of a batch."""

    def update_rows(self, table: NoiseTable, index: Tensor, labels: Tensor, facts: Facts, step: Step) -> None:
        """Apply the facts to the rows, in place."""


def choose_kernels(device: torch.device, dtype: torch.dtype = torch.float32) -> Kernels:
    """Return the kernels for logits of this device and dtype. float64, used only in tests, takes the reference."""
    wanted = os.environ.get("SOPDIST_KERNELS") or _DEFAULTS.get(device.type, "reference")
    if wanted not in ("reference", "native", "triton"):
        raise ValueError(f"SOPDIST_KERNELS must be 'reference', 'native' or 'triton', got {wanted!r}")
    if wanted == "reference" or dtype == torch.float64:
        return reference
    if wanted == "native":
        if device.type != "cpu":
            raise RuntimeError(f"SOPDIST_KERNELS=native is for CPU tensors, but these are on {device}")
        return native_kernels
    if importlib.util.find_spec("triton") is None:
        raise RuntimeError("SOPDIST_KERNELS=triton, but Triton is not installed: pip install 'sopdist[triton]'")
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("SOPDIST_KERNELS=triton on CPU tensors needs Triton's interpreter: set TRITON_INTERPRET=1")
    from . import triton_kernels

    return triton_kernels
