"""The Triton kernels under one name, as `choose_kernels` hands them out."""

from .triton_loss import fused_loss
from .triton_rows import update_rows

__all__ = ["fused_loss", "update_rows"]
