"""A pool of memory buffers for batches, which are reused once they are no longer referenced.

A batch of 64 images at 224 pixels is 38 MB. The kernel maps fresh memory of that size page by page, which costs almost
as much as decoding the images. The pool therefore keeps its buffers and returns one again as soon as its reference
count shows that the last tensor on it is gone.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray


class BufferPool:
    """Arrays of a few shapes. Only one thread may take from the pool."""

    def __init__(self, max_free: int = 4) -> None:
        self._max_free = max_free
        self._buffers: list[NDArray[Any]] = []

    def take(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Return an uninitialised array that is not in use. It becomes free when it is no longer referenced."""
        free = self._find_free()
        if len(free) > self._max_free:  # the consumer released many batches, or needs another shape
            kept = set(range(len(self._buffers))) - set(free[: -self._max_free])
            self._buffers = [self._buffers[i] for i in sorted(kept)]
            free = self._find_free()
        for i in reversed(free):  # newest first
            if self._buffers[i].shape == shape and self._buffers[i].dtype == dtype:
                return self._buffers[i]
        self._buffers.append(np.empty(shape, dtype))
        return self._buffers[-1]

    def held_bytes(self) -> int:
        """Total bytes of all buffers, free or in use."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def _find_free(self) -> list[int]:
        # A free buffer is referenced by the list and, during the call, by getrefcount's argument.
        return [i for i in range(len(self._buffers)) if sys.getrefcount(self._buffers[i]) == 2]
