"""The Triton kernels as one module, which `choose_kernels` returns."""

from .triton_loss import fused_loss
from .triton_rows import update_rows

__all__ = ["fused_loss", "update_rows"]
