"""Part 3 of `sopdist bench checkpoint`: time to the first batch after a resume.

A run resumes at an early, a middle and a late step of an epoch. The baseline reads all earlier batches again. One
process runs the input pipeline alone: of the rest of a start, only reading `metrics.jsonl` takes longer after more
steps.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..data.settings import DataSettings
from ..data.stream import Stream
from .photos import photo_jpegs, write_photo_shards

EPOCH = 1

_SHARD, _PICTURES = 64, 64


def first_batches(samples: int, batch: int, rounds: int) -> tuple[dict[int, list[float]], float]:
    """Seconds to the first batch in each round, by the step of the resume; and seconds to read the full epoch."""
    with tempfile.TemporaryDirectory(prefix="sopdist-bench-") as name:
        folder = Path(name)
        write_photo_shards(folder, photo_jpegs(_PICTURES), "jpg", _SHARD, copies=-(-samples // _PICTURES))
        with _opened(folder, batch) as stream:
            steps = stream.steps
            start = time.perf_counter()
            for _ in stream.epoch(EPOCH):
                pass
            full_epoch = time.perf_counter() - start
        found: dict[int, list[float]] = {step: [] for step in (0, steps // 2, steps - 1)}
        for _ in range(rounds):
            for step, seconds in found.items():
                seconds.append(_first_batch(folder, batch, step))
    return found, full_epoch


def _first_batch(folder: Path, batch: int, step: int) -> float:
    start = time.perf_counter()
    with _opened(folder, batch) as stream:
        next(iter(stream.epoch(EPOCH, step)))
        return time.perf_counter() - start


@contextmanager
def _opened(folder: Path, batch: int) -> Iterator[Stream]:
    stream = Stream(DataSettings(root=str(folder), recipe="imagenet", threads=1), batch, seed=0)
    try:
        yield stream
    finally:
        stream.close()
