"""The `cpu` decoder: threads that read, decode, crop and normalise. What they call lets go of Python's lock."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future

import numpy as np
import torch
from numpy.typing import NDArray

from ..augment.policy import Policy
from ..augment.recipes import Recipe
from ..errors import ImageError
from ..split import Split
from .buffers import BufferPool
from .images import decode_image
from .pixels import Normalizer, Pixels, crop
from .request import BadSample, Decoded, Encoded, Request, bad_sample, choose_boxes, read_sample
from .strong import strong_view
from .workers import Workers

_CHUNK = 16  # images a thread takes at a time: few enough to share a batch, enough to make NumPy calls worth it

Bad = dict[int, BadSample]
View = NDArray[np.float32]  # (B, size, size, 3)


class CpuDecoder:
    """See `request.Decoder`."""

    def __init__(self, split: Split, recipe: Recipe, strong: Policy | None, threads: int, max_pixels: int) -> None:
        self._split = split
        self._recipe = recipe
        self._strong = strong
        self._max_pixels = max_pixels
        self._normalize = Normalizer(recipe.mean, recipe.std)
        self._workers = Workers(threads, "sopdist-decode")
        self._of_thread = threading.local()
        self._buffers = BufferPool()
        self._pending: deque[tuple[list[View], list[Future[Bad]]]] = deque()

    def submit(self, request: Request) -> None:
        """Hand the batch to the threads, a few images each."""
        count, side = len(request.index), self._recipe.size
        views = [self._buffers.take((count, side, side, 3), np.float32) for _ in range(request.views)]
        chunks = [slice(start, min(start + _CHUNK, count)) for start in range(0, count, _CHUNK)]
        self._pending.append((views, [self._workers.submit(self._decode, request, chunk, views) for chunk in chunks]))

    def collect(self) -> Decoded:
        """Wait for the oldest batch."""
        views, futures = self._pending.popleft()
        bad: Bad = {}
        for future in futures:
            bad.update(future.result())
        return Decoded([torch.from_numpy(view).permute(0, 3, 1, 2) for view in views], bad)

    def discard(self) -> None:
        """Cancel what has not begun. What has goes on in buffers that nobody else gets before it ends."""
        for _, futures in self._pending:
            for future in futures:
                future.cancel()
        self._pending.clear()

    def close(self) -> None:
        """Stop the threads."""
        self.discard()
        self._workers.close()

    def held_bytes(self) -> int:
        """Buffers of batches; encoded images are held a few at a time by each thread."""
        return self._buffers.held_bytes()

    def _decode(self, request: Request, chunk: slice, views: list[View]) -> Bad:
        """Fill the chunk's part of each view; returns the bad samples."""
        bad: Bad = {}
        good: list[tuple[int, Encoded]] = []
        for place in range(chunk.start, chunk.stop):
            sample = read_sample(self._split, int(request.index[place]), self._max_pixels)
            if isinstance(sample, BadSample):
                bad[place] = sample
            else:
                good.append((place, sample))
        places = [place for place, _ in good]
        boxes = choose_boxes(
            self._recipe, [sample.header for _, sample in good], [numbers[places] for numbers in request.uniforms]
        )
        cut = self._scratch(len(views))
        for number, (place, sample) in enumerate(good):
            try:
                pixels = decode_image(*sample)
            except ImageError as error:
                bad[place] = bad_sample(self._split, int(request.index[place]), error)
                continue
            for view, (box, mirror) in enumerate(boxes):
                crop(pixels, box[number], bool(mirror[number]), cut[view, place - chunk.start])
            self._normalize(cut[0, place - chunk.start], views[0][place])
        if self._strong is not None and request.draws is not None:
            strong = cut[1, : chunk.stop - chunk.start]
            strong_view(strong, request.draws[chunk], self._strong, self._normalize, views[1][chunk])
        for place in bad:
            for target in views:
                target[place] = 0
        return bad

    def _scratch(self, views: int) -> Pixels:
        """Memory of this thread for the pictures of a chunk, (views, _CHUNK, size, size, 3); fresh memory is slow."""
        if not hasattr(self._of_thread, "cut"):
            side = self._recipe.size
            self._of_thread.cut = np.zeros((views, _CHUNK, side, side, 3), np.uint8)
        cut: Pixels = self._of_thread.cut
        return cut
