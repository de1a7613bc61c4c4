"""Correctly rounded square root (IEEE 754).

`torch.sqrt` on CPU tensors uses a vector math library whose last bit is sometimes wrong: sqrt(x * x) is not always |x|,
and CPU and GPU would disagree. NumPy uses the processor's own instruction, which rounds correctly.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def sqrt_rounded(x: Tensor) -> Tensor:
    """Correctly rounded square root of a float tensor that does not require grad."""
    if x.device.type == "cpu":
        return torch.from_numpy(np.sqrt(np.atleast_1d(x.numpy()))).reshape(x.shape)
    return torch.sqrt(x)
