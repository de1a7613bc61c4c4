"""Memory for batches, used again once nobody looks at it.

A batch of 64 images at 224 pixels is 38 MB. Fresh memory of that size comes from the kernel page by page, at a cost
near that of decoding the images. So buffers are kept, and one is handed out again as soon as the last tensor on it is
gone, which its reference count tells.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

_FREE = 3  # references to a buffer nobody uses: the pool's list, the loop's variable, getrefcount's argument


class BufferPool:
    """Arrays of a few shapes, for one thread to take from."""

    def __init__(self, most_free: int = 8) -> None:
        self._most_free = most_free
        self._buffers: list[NDArray[Any]] = []

    def take(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """An array of arbitrary content that nobody else uses. It is free again when it is no longer referred to."""
        free = 0
        found: int | None = None
        for place, buffer in enumerate(self._buffers):
            if sys.getrefcount(buffer) <= _FREE:
                free += 1
                if buffer.shape == shape and buffer.dtype == dtype:
                    found = place
        buffer = np.empty(shape, dtype) if found is None else self._buffers.pop(found)
        if found is None and free >= self._most_free:  # of shapes that are not asked for any more
            self._buffers = [kept for kept in self._buffers if sys.getrefcount(kept) > _FREE]
        self._buffers.append(buffer)  # the latest at the end: its memory is likely still in the cache
        return buffer

    def held_bytes(self) -> int:
        """Bytes of all buffers, free or in use."""
        return sum(buffer.nbytes for buffer in self._buffers)
