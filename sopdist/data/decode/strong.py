"""The strong view on a CPU: the policy, a few images at a time, called by many threads."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from ..augment.policy import Policy, apply_policy
from .pixels import Normalizer, Pixels


def strong_view(
    pixels: Pixels, draws: NDArray[np.float64], policy: Policy, normalize: Normalizer, to: NDArray[np.float32]
) -> None:
    """Apply the policy to (n, size, size, 3) bytes and write them, normalised, to `to`."""
    changed = apply_policy(torch.from_numpy(pixels), torch.from_numpy(draws), policy)
    normalize(changed.numpy(), to)
