"""The `dali` decoder: encoded images and their boxes go in from outside, DALI decodes, resizes, mirrors, normalises.

Reading and choosing boxes is ours (threads, as in the cpu decoder), so order, crops and resume do not depend on DALI.
Ordinary files go in as they are. What decoders disagree on (CMYK, 16 bits, transparency, animations, files with an
orientation) is decoded by us and goes in as PPM, which is pixels with a line of text before them.

DALI fails a whole batch for one image that it cannot decode, and is unusable afterwards. Then a new pipeline is built
and the batches under way are run again, one by one; in the one that fails, each sample on its own. So what becomes of
a sample never depends on its company.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..augment.policy import Policy, apply_policy
from ..augment.recipes import Recipe
from ..errors import ImageError
from ..headers import ImageHeader
from ..split import Split
from .buffers import BufferPool
from .dali_pipeline import BLACK, Pipeline, build_pipeline, feed, ppm
from .images import decode_image
from .pixels import Normalizer
from .request import BadSample, Decoded, Encoded, Request, bad_sample, choose_boxes, read_sample
from .strong import strong_view
from .workers import Workers

_CHUNK = 16  # samples a thread reads at a time
_DEPTH = 2  # batches inside DALI at a time


@dataclass
class _Work:
    """A batch on its way."""

    request: Request
    reading: list[Future[list[Encoded | BadSample]]]
    bad: dict[int, BadSample] = field(default_factory=dict)
    encoded: list[NDArray[np.uint8]] = field(default_factory=list)  # by position
    boxes: list[tuple[NDArray[np.int32], NDArray[np.bool_]]] = field(default_factory=list)  # by view


class DaliDecoder:
    """See `request.Decoder`."""

    def __init__(
        self,
        split: Split,
        recipe: Recipe,
        strong: Policy | None,
        threads: int,
        max_pixels: int,
        *,
        batch: int,
        views: int,
        device: int | None,
    ) -> None:
        self._split, self._recipe, self._strong, self._max_pixels = split, recipe, strong, max_pixels
        self._batch, self._views, self._threads, self._device = batch, views, threads, device
        self._normalize = Normalizer(recipe.mean, recipe.std)
        self._readers = Workers(threads, "sopdist-read")
        self._strengtheners = None if strong is None or device is not None else Workers(threads, "sopdist-policy")
        self._refused: set[int] = set()  # samples that DALI failed on, and gets as pixels from then on
        self._in_order = True  # our queues agree with DALI's
        self._buffers = BufferPool()
        self._reading: deque[_Work] = deque()  # submitted, and not yet inside DALI
        self._running: deque[_Work] = deque()  # inside DALI
        self._pipeline = self._build()

    def submit(self, request: Request) -> None:
        """Start reading; DALI gets the batch when it is its turn."""
        count = len(request.index)
        chunks = [slice(start, min(start + _CHUNK, count)) for start in range(0, count, _CHUNK)]
        reading = [self._readers.submit(self._read, request.index[chunk]) for chunk in chunks]
        self._reading.append(_Work(request, reading))
        with self._keeping_step():
            self._feed_those_read()

    def collect(self) -> Decoded:
        """Wait for the oldest batch, and keep DALI busy."""
        with self._keeping_step():
            if not self._running:
                self._feed(self._reading.popleft())
            self._feed_those_read()
            try:
                views = self._outputs()
            except RuntimeError:
                work, views = self._recover()
            else:
                work = self._running.popleft()
            self._feed_those_read()
        return self._decoded(work, views)

    def discard(self) -> None:
        """Forget all batches; those inside DALI have to be finished first."""
        if sys.is_finalizing():  # an epoch was left unfinished until the very end: DALI is gone already
            return
        while self._reading:
            for future in self._reading.popleft().reading:
                future.cancel()
        if self._in_order:
            with suppress(RuntimeError), self._keeping_step():
                while self._running:
                    self._outputs()
                    self._running.popleft()
        if not self._in_order:
            self._running.clear()
            self._pipeline = self._build()
            self._in_order = True

    def close(self) -> None:
        """Stop the threads, ours and DALI's."""
        if self._pipeline is not None:
            self.discard()
            self._pipeline = None
        for workers in (self._readers, self._strengtheners):
            if workers is not None:
                workers.close()

    def held_bytes(self) -> int:
        """Encoded batches and pictures inside DALI, and buffers of strong views."""
        encoded = sum(data.nbytes for work in self._running for data in work.encoded)
        pictures = len(self._running) * self._batch * self._views * self._recipe.size**2 * 3 * 4
        return encoded + pictures + self._buffers.held_bytes()

    @contextmanager
    def _keeping_step(self) -> Iterator[None]:
        """Around all that moves DALI's queues and ours. If it is left by an interrupt, nobody knows what DALI holds:
        then `discard` starts with a new pipeline, instead of handing out one batch's pictures as another's."""
        in_order, self._in_order = self._in_order, False
        yield  # without try and finally, on purpose
        self._in_order = in_order

    def _build(self) -> Pipeline:
        return build_pipeline(self._recipe, self._batch, self._views, self._threads, _DEPTH, self._device)

    def _read(self, index: NDArray[np.int64]) -> list[Encoded | BadSample]:
        samples = (read_sample(self._split, int(number), self._max_pixels) for number in index)
        return [
            sample if isinstance(sample, BadSample) else self._for_dali(int(number), sample)
            for number, sample in zip(index, samples, strict=True)
        ]

    def _for_dali(self, index: int, sample: Encoded) -> Encoded | BadSample:
        """The sample in a form that every decoder agrees on."""
        if sample.header.plain and sample.header.orientation == 1 and index not in self._refused:
            return sample
        return self._as_ppm(index, sample)

    def _as_ppm(self, index: int, sample: Encoded) -> Encoded | BadSample:
        try:
            pixels = decode_image(*sample)
        except ImageError as error:
            return bad_sample(self._split, index, error)
        return Encoded(ppm(pixels), sample.header._replace(orientation=1, plain=True))

    def _feed_those_read(self) -> None:
        while self._reading and len(self._running) < _DEPTH and all(part.done() for part in self._reading[0].reading):
            self._feed(self._reading.popleft())

    def _feed(self, work: _Work) -> None:
        """Wait until the batch was read, then hand it to DALI."""
        samples = [sample for part in work.reading for sample in part.result()]
        work.reading.clear()
        headers: list[ImageHeader] = []
        for place, sample in enumerate(samples):
            if isinstance(sample, BadSample):
                work.bad[place] = sample
                sample = _NOTHING
            work.encoded.append(np.frombuffer(sample.data, np.uint8))
            headers.append(sample.header)
        work.boxes = choose_boxes(self._recipe, headers, work.request.uniforms)
        self._run(work)
        self._running.append(work)

    def _run(self, work: _Work, part: slice = slice(None)) -> None:
        """Start DALI on a part of a batch."""
        feed(self._pipeline, work.encoded, work.boxes, part)
        self._pipeline.schedule_run()

    def _outputs(self) -> list[Tensor]:
        """Wait for what was started first. The tensors are ours to keep: DALI's dynamic executor gives memory away."""
        outputs = self._pipeline.share_outputs()
        tensors = [torch.from_dlpack(output.as_tensor()) for output in outputs]
        self._pipeline.release_outputs()
        return tensors

    def _decoded(self, work: _Work, views: list[Tensor]) -> Decoded:
        if self._strong is not None and work.request.draws is not None:
            views[1] = self._strengthen(views[1], work.request.draws)
        for place in work.bad:
            for view in views:
                view[place] = 0
        return Decoded([view.permute(0, 3, 1, 2) for view in views], work.bad)  # (B, S, S, 3) -> (B, 3, S, S)

    def _strengthen(self, pixels: Tensor, draws: NDArray[np.float64]) -> Tensor:
        """Make the strong view out of bytes: where they are, on a GPU at once, on the CPU shared by the threads."""
        assert self._strong is not None
        if self._strengtheners is None:
            return self._normalize.tensor(apply_policy(pixels, torch.from_numpy(draws), self._strong))
        view = self._buffers.take(tuple(pixels.shape), np.float32)
        chunks = (slice(start, start + _CHUNK) for start in range(0, len(pixels), _CHUNK))
        array, strong, normalize = pixels.numpy(), self._strong, self._normalize
        for future in [
            self._strengtheners.submit(strong_view, array[c], draws[c], strong, normalize, view[c]) for c in chunks
        ]:
            future.result()
        return torch.from_numpy(view)

    def _recover(self) -> tuple[_Work, list[Tensor]]:
        """An image that DALI cannot decode: run everything again that was under way; see the module's docstring."""
        first, *others = self._running
        self._running.clear()
        self._pipeline = self._build()
        self._run(first)
        try:
            outputs = self._outputs()
        except RuntimeError:
            self._pipeline = self._build()
            outputs = self._one_by_one(first)
        for work in others:
            self._run(work)
            self._running.append(work)
        return first, outputs

    def _one_by_one(self, work: _Work) -> list[Tensor]:
        """Each sample on its own; those that DALI cannot decode are decoded by us, or are bad."""
        rows: list[list[Tensor]] = []
        for place in range(len(work.encoded)):
            try:
                self._run(work, slice(place, place + 1))
                rows.append(self._outputs())
            except RuntimeError:
                self._pipeline = self._build()
                index = int(work.request.index[place])
                self._refused.add(index)
                sample = read_sample(self._split, index, self._max_pixels)
                if isinstance(sample, Encoded):
                    sample = self._as_ppm(index, sample)
                if isinstance(sample, BadSample):
                    work.bad[place] = sample
                    sample = _NOTHING
                    for box, _ in work.boxes:
                        box[place] = (0, 0, 1, 1)
                work.encoded[place] = np.frombuffer(sample.data, np.uint8)
                self._run(work, slice(place, place + 1))
                rows.append(self._outputs())
        return [torch.cat(view) for view in zip(*rows, strict=True)]


# In the place of a bad sample.
_NOTHING = Encoded(ppm(BLACK), ImageHeader("ppm", width=1, height=1, orientation=1, plain=True))
