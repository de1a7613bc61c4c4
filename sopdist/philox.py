"""Philox-4x32-10, a stateless random number generator: its output is a pure function of (seed, counter).

It generates all random numbers that must not depend on which process draws them, or when. A counter is four 32-bit
words. This table assigns disjoint counter ranges to the modules, so that no two purposes share random numbers:

    c3 = 0, 1         noise/counter.py: initial values, c0 = class // 4, c1 and c2 = sample
    c3 = 2 modulo 4   data/augment/draws.py: augmentation, c0 = block, c1 and c2 = sample, c3 also holds view and epoch
"""

from __future__ import annotations

from torch import Tensor

WORD_MASK = 0xFFFFFFFF

_ROUND_A, _ROUND_B = 0xD2511F53, 0xCD9E8D57
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85


def philox(seed: int, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Apply Philox-4x32-10 to 32-bit counters in int64 tensors. Returns four int64 tensors of 32-bit words."""
    k0, k1 = seed & WORD_MASK, (seed >> 32) & WORD_MASK
    for _ in range(10):
        # int64 products wrap modulo 2^64, so both halves of the 64-bit product are correct after masking.
        high, low = c2 * _ROUND_B, c0 * _ROUND_A
        c0 = ((high >> 32) & WORD_MASK) ^ c1 ^ k0
        c2 = ((low >> 32) & WORD_MASK) ^ c3 ^ k1
        c1 = high & WORD_MASK
        c3 = low & WORD_MASK
        k0 = (k0 + _KEY_A) & WORD_MASK
        k1 = (k1 + _KEY_B) & WORD_MASK
    return c0, c1, c2, c3
