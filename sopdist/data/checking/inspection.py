"""Image headers of many samples, and random subsets of them, for `sopdist inspect`. Does not decode images."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from ..headers import ImageHeader, read_header
from ..split import Split

_READERS = 8  # threads: on a network file system, most of the time is spent waiting

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class HeaderResult:
    """The header of one sample's image, or the reason why it could not be read."""

    index: int
    bytes: int
    header: ImageHeader | None
    reason: str  # empty if there is a header


def read_headers(split: Split, indices: Indices) -> Iterator[HeaderResult]:
    """Read the image headers of these samples, in their order, with several threads."""

    def read(index: int) -> HeaderResult:
        size = 0
        try:
            content = split.image(index)
            size = len(content)
            return HeaderResult(index, size, read_header(content), "")
        except (DataError, OSError) as reason:
            return HeaderResult(index, size, None, str(reason))

    with ThreadPoolExecutor(_READERS) as pool:
        yield from pool.map(read, indices.tolist())


def choose(candidates: Indices, count: int, seed: int) -> Indices:
    """A random subset of at most `count` candidates, ascending.

    Only for display: unlike label noise, the result may change between versions of NumPy.
    """
    if len(candidates) <= count:
        return candidates
    return np.sort(np.random.default_rng(seed).choice(candidates, count, replace=False))
