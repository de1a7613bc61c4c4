"""The reference kernels as one module, which `choose_kernels` returns."""

from .reference_loss import fused_loss
from .reference_rows import update_rows

__all__ = ["fused_loss", "update_rows"]
