"""The square root as IEEE 754 rounds it.

`torch.sqrt` of CPU tensors goes through a vector maths library whose last bit is sometimes off, so that sqrt(x * x) is
not always |x| and a CPU would not agree with a GPU. NumPy uses the processor's own instruction, which is right.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def sqrt_rounded(x: Tensor) -> Tensor:
    """Correctly rounded square root of a float tensor that takes no part in autograd."""
    if x.device.type == "cpu":
        return torch.from_numpy(np.sqrt(np.atleast_1d(x.numpy()))).reshape(x.shape)
    return torch.sqrt(x)
