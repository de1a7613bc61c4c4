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


class BufferPool:
    """Arrays of a few shapes, for one thread to take from."""

    def __init__(self, most_free: int = 4) -> None:
        self._most_free = most_free
        self._buffers: list[NDArray[Any]] = []

    def take(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """An array of arbitrary content that nobody else uses. It is free again when it is no longer referred to."""
        free = self._free_places()
        if len(free) > self._most_free:  # a consumer let go of many batches, or asks for another shape
            kept = set(range(len(self._buffers))) - set(free[: -self._most_free])
            self._buffers = [self._buffers[place] for place in sorted(kept)]
            free = self._free_places()
        for place in reversed(free):  # the newest
            if self._buffers[place].shape == shape and self._buffers[place].dtype == dtype:
                return self._buffers[place]
        self._buffers.append(np.empty(shape, dtype))
        return self._buffers[-1]

    def held_bytes(self) -> int:
        """Bytes of all buffers, free or in use."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def _free_places(self) -> list[int]:
        # A buffer nobody uses is referred to by the list and, during the call, by getrefcount's argument.
        return [place for place in range(len(self._buffers)) if sys.getrefcount(self._buffers[place]) == 2]
