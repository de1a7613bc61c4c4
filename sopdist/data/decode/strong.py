"""The strong view on the CPU, for a few images at a time; called from several threads."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from ..augment.policy import Policy, apply_policy
from .pixels import Normalizer, Pixels


def strong_view(
    pixels: Pixels, draws: NDArray[np.float64], policy: Policy, normalize: Normalizer, to: NDArray[np.float32]
) -> None:
    """Apply the policy to images, uint8 (n, size, size, 3), and write them, normalised, to `to`."""
    strong = apply_policy(torch.from_numpy(pixels), torch.from_numpy(draws), policy)
    normalize(strong.numpy(), to)
