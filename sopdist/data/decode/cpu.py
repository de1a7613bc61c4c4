"""The `cpu` decoder: threads that read, decode, crop and normalise images, mostly with the GIL released."""

from __future__ import annotations

import threading
from collections import deque

import numpy as np
import torch
from numpy.typing import NDArray

from ...errors import ImageError
from ..augment.recipes import Recipe
from ..split import Split
from .buffers import BufferPool
from .images import decode_image
from .pixels import Normalizer, Pixels, crop
from .request import BadSample, Decoded, Encoded, Request, Views, bad_sample, choose_boxes, read_sample
from .strong import strong_view
from .workers import Task, Workers

_CHUNK = 16  # images per task: small enough to spread a batch over the threads, large enough to amortise NumPy calls

Bad = dict[int, BadSample]
View = NDArray[np.float32]  # (B, size, size, 3)


class CpuDecoder:
    """See `request.Decoder`."""

    def __init__(self, split: Split, recipe: Recipe, views: Views, threads: int, max_pixels: int) -> None:
        self._split = split
        self._recipe = recipe
        self._policies = {view: policy for view, policy in enumerate(views) if policy is not None}
        self._max_pixels = max_pixels
        self._normalize = Normalizer(recipe.mean, recipe.std)
        self._workers = Workers(threads, "sopdist-decode")
        self._thread_local = threading.local()
        self._buffers = BufferPool()
        self._pending: deque[tuple[list[View], list[Task[Bad]]]] = deque()

    def submit(self, request: Request) -> None:
        """Queue the batch for the threads, in chunks of a few images."""
        count, side = len(request.index), self._recipe.size
        views = [self._buffers.take((count, side, side, 3), np.float32) for _ in range(request.views)]
        chunks = [slice(start, min(start + _CHUNK, count)) for start in range(0, count, _CHUNK)]
        self._pending.append((views, [self._workers.submit(self._decode, request, chunk, views) for chunk in chunks]))

    def collect(self) -> Decoded:
        """Wait for the oldest batch."""
        views, tasks = self._pending.popleft()
        bad: Bad = {}
        for task in tasks:
            bad.update(task.result())
        return Decoded([torch.from_numpy(view).permute(0, 3, 1, 2) for view in views], bad)

    def discard(self) -> None:
        """Cancel chunks that have not started. The others finish in their buffers, which are not reused before."""
        for _, tasks in self._pending:
            for task in tasks:
                task.cancel()
        self._pending.clear()

    def close(self) -> None:
        """Stop the threads."""
        self.discard()
        self._workers.close()

    def held_bytes(self) -> int:
        """Bytes of the batch buffers. In addition, each thread holds a few encoded images at a time."""
        return self._buffers.held_bytes()

    def _decode(self, request: Request, chunk: slice, views: list[View]) -> Bad:
        """Fill the chunk's part of each view, and return its bad samples by position in the batch."""
        bad: Bad = {}
        good: list[tuple[int, Encoded]] = []
        for position in range(chunk.start, chunk.stop):
            sample = read_sample(self._split, int(request.index[position]), self._max_pixels)
            if isinstance(sample, BadSample):
                bad[position] = sample
            else:
                good.append((position, sample))
        positions = [position for position, _ in good]
        boxes = choose_boxes(
            self._recipe, [sample.header for _, sample in good], [uniforms[positions] for uniforms in request.uniforms]
        )
        crops = self._scratch(len(views))
        for i, (position, sample) in enumerate(good):
            try:
                pixels = decode_image(*sample)
            except ImageError as error:
                bad[position] = bad_sample(self._split, int(request.index[position]), error)
                continue
            for view, (box, mirror) in enumerate(boxes):
                crop(pixels, box[i], bool(mirror[i]), crops[view, position - chunk.start])
                if view not in request.draws:
                    self._normalize(crops[view, position - chunk.start], views[view][position])
        for view, draws in request.draws.items():
            pixels = crops[view, : chunk.stop - chunk.start]
            strong_view(pixels, draws[chunk], self._policies[view], self._normalize, views[view][chunk])
        for position in bad:
            for target in views:
                target[position] = 0
        return bad

    def _scratch(self, views: int) -> Pixels:
        """This thread's buffer for the crops of a chunk, (views, _CHUNK, size, size, 3); fresh memory is slow."""
        if not hasattr(self._thread_local, "crops"):
            side = self._recipe.size
            self._thread_local.crops = np.zeros((views, _CHUNK, side, side, 3), np.uint8)
        crops: Pixels = self._thread_local.crops
        return crops
