"""The random numbers of augmentation, as a pure function of (seed, epoch, sample, view).

A sample therefore gets the same crop on any number of ranks, with either backend, and after a resume.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from ...philox import WORD_MASK, philox

_STREAM = 2  # see philox.py
_VIEWS = 4
_MAX_EPOCH = (1 << 32) // (4 * _VIEWS)

# What the uniforms are used for. A block is four words; a new purpose takes new blocks.
GEOMETRY = slice(0, 24)
POLICY = slice(24, 44)


def uniforms(
    seed: int, epoch: int, index: NDArray[np.int64], view: int, which: slice = GEOMETRY
) -> NDArray[np.float64]:
    """Uniform random numbers in [0, 1) for each sample, (len(index), which.stop - which.start)."""
    if not 0 <= view < _VIEWS or not 0 <= epoch < _MAX_EPOCH:
        raise ValueError(f"view {view}, epoch {epoch}: out of range")
    sample = torch.from_numpy(np.ascontiguousarray(index))[:, None]  # (B, 1)
    block = torch.arange(which.start // 4, which.stop // 4)[None]  # (1, blocks)
    sample, block = torch.broadcast_tensors(sample, block)
    stream = torch.full_like(block, _STREAM + 4 * (view + _VIEWS * epoch))
    words = torch.stack(philox(seed, block, sample & WORD_MASK, (sample >> 32) & WORD_MASK, stream), dim=-1)
    return words.flatten(1).numpy() * 2.0**-32  # (B, blocks, 4) -> (B, 4 * blocks)
