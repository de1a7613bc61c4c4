"""The `dali` decoder: feeds encoded images and their boxes to DALI, which decodes, resizes, mirrors and normalises.

Our own threads read the samples and choose the boxes, as in the cpu decoder, so order, crops and resume do not depend
on DALI. Ordinary files are passed on unchanged. Files that decoders disagree on (CMYK, 16 bits, transparency,
animations, EXIF orientation) are decoded here and passed on as PPM: raw pixels after a short header.

If DALI cannot decode one image, the entire batch fails and the pipeline becomes unusable. The decoder then builds a new
pipeline and runs the pending batches again, one by one; in the failing batch, it runs each sample separately. The
result of a sample therefore never depends on the other samples of its batch.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...errors import ImageError
from ..augment.policy import Policy, apply_policy
from ..augment.recipes import Recipe
from ..headers import ImageHeader
from ..split import Split
from .buffers import BufferPool
from .dali_pipeline import BLACK, Pipeline, build_pipeline, feed, ppm
from .images import decode_image
from .pixels import Normalizer
from .request import BadSample, Decoded, Encoded, Request, Views, bad_sample, choose_boxes, read_sample
from .strong import strong_view
from .workers import Task, Workers

_CHUNK = 16  # samples per reading task
_DEPTH = 2  # batches inside DALI at a time


@dataclass
class _Pending:
    """A batch that was submitted and not yet collected."""

    request: Request
    reading: list[Task[list[Encoded | BadSample]]]
    bad: dict[int, BadSample] = field(default_factory=dict)
    encoded: list[NDArray[np.uint8]] = field(default_factory=list)  # by position
    boxes: list[tuple[NDArray[np.int32], NDArray[np.bool_]]] = field(default_factory=list)  # by view


class DaliDecoder:
    """See `request.Decoder`."""

    def __init__(
        self,
        split: Split,
        recipe: Recipe,
        views: Views,
        threads: int,
        max_pixels: int,
        *,
        batch: int,
        device: int | None,
    ) -> None:
        self._split, self._recipe, self._max_pixels = split, recipe, max_pixels
        self._policies = {view: policy for view, policy in enumerate(views) if policy is not None}
        self._batch, self._views, self._threads, self._device = batch, len(views), threads, device
        self._normalize = Normalizer(recipe.mean, recipe.std)
        self._readers = Workers(threads, "sopdist-read")
        self._policy_workers = None if not self._policies or device is not None else Workers(threads, "sopdist-policy")
        self._refused: set[int] = set()  # samples that DALI failed on; from then on it gets them as PPM
        self._in_sync = True  # whether our queues match DALI's
        self._buffers = BufferPool()
        self._reading: deque[_Pending] = deque()  # submitted, but not yet inside DALI
        self._running: deque[_Pending] = deque()  # inside DALI
        self._pipeline = self._build()

    def submit(self, request: Request) -> None:
        """Start reading the batch. It is passed to DALI when its turn comes."""
        count = len(request.index)
        chunks = [slice(start, min(start + _CHUNK, count)) for start in range(0, count, _CHUNK)]
        reading = [self._readers.submit(self._read, request.index[chunk]) for chunk in chunks]
        self._reading.append(_Pending(request, reading))
        with self._changing_queues():
            self._feed_ready()

    def collect(self) -> Decoded:
        """Wait for the oldest batch, and keep DALI supplied."""
        with self._changing_queues():
            if not self._running:
                self._feed(self._reading.popleft())
            self._feed_ready()
            try:
                views = self._outputs()
            except RuntimeError:
                pending, views = self._recover()
            else:
                pending = self._running.popleft()
            self._feed_ready()
        return self._decoded(pending, views)

    def discard(self) -> None:
        """Drop all batches. Those inside DALI must finish first."""
        if sys.is_finalizing():  # an unfinished epoch at interpreter shutdown: DALI is already gone
            return
        while self._reading:
            for task in self._reading.popleft().reading:
                task.cancel()
        if self._in_sync:
            with suppress(RuntimeError), self._changing_queues():
                while self._running:
                    self._outputs()
                    self._running.popleft()
        if not self._in_sync:
            self._running.clear()
            self._pipeline = self._build()
            self._in_sync = True

    def close(self) -> None:
        """Stop all threads, including DALI's."""
        if self._pipeline is not None:
            self.discard()
            self._pipeline = None
        for workers in (self._readers, self._policy_workers):
            if workers is not None:
                workers.close()

    def held_bytes(self) -> int:
        """Bytes of encoded batches and images inside DALI, and of the buffers for strong views."""
        encoded = sum(data.nbytes for pending in self._running for data in pending.encoded)
        images = len(self._running) * self._batch * self._views * self._recipe.size**2 * 3 * 4
        return encoded + images + self._buffers.held_bytes()

    @contextmanager
    def _changing_queues(self) -> Iterator[None]:
        """Wraps every change of DALI's queues and ours. After an interrupt inside it, DALI's contents are unknown:
        `discard` then builds a new pipeline, so that one batch's images are never returned as another's."""
        in_sync, self._in_sync = self._in_sync, False
        yield  # deliberately without try/finally
        self._in_sync = in_sync

    def _build(self) -> Pipeline:
        strong = [view in self._policies for view in range(self._views)]
        return build_pipeline(self._recipe, self._batch, strong, self._threads, _DEPTH, self._device)

    def _read(self, index: NDArray[np.int64]) -> list[Encoded | BadSample]:
        samples = (read_sample(self._split, int(i), self._max_pixels) for i in index)
        return [
            sample if isinstance(sample, BadSample) else self._for_dali(int(i), sample)
            for i, sample in zip(index, samples, strict=True)
        ]

    def _for_dali(self, index: int, sample: Encoded) -> Encoded | BadSample:
        """The sample in a form that all decoders decode identically."""
        if sample.header.plain and sample.header.orientation == 1 and index not in self._refused:
            return sample
        return self._as_ppm(index, sample)

    def _as_ppm(self, index: int, sample: Encoded) -> Encoded | BadSample:
        try:
            pixels = decode_image(*sample)
        except ImageError as error:
            return bad_sample(self._split, index, error)
        return Encoded(ppm(pixels), sample.header._replace(orientation=1, plain=True))

    def _feed_ready(self) -> None:
        while self._reading and len(self._running) < _DEPTH and all(part.done() for part in self._reading[0].reading):
            self._feed(self._reading.popleft())

    def _feed(self, pending: _Pending) -> None:
        """Wait until the batch has been read, then pass it to DALI."""
        samples = [sample for part in pending.reading for sample in part.result()]
        pending.reading.clear()
        headers: list[ImageHeader] = []
        for position, sample in enumerate(samples):
            if isinstance(sample, BadSample):
                pending.bad[position] = sample
                sample = _PLACEHOLDER
            pending.encoded.append(np.frombuffer(sample.data, np.uint8))
            headers.append(sample.header)
        pending.boxes = choose_boxes(self._recipe, headers, pending.request.uniforms)
        self._run(pending)
        self._running.append(pending)

    def _run(self, pending: _Pending, part: slice = slice(None)) -> None:
        """Start DALI on a batch, or a part of it."""
        feed(self._pipeline, pending.encoded, pending.boxes, part)
        self._pipeline.schedule_run()

    def _outputs(self) -> list[Tensor]:
        """Wait for the oldest run. We may keep the tensors: DALI's dynamic executor does not reuse their memory."""
        outputs = self._pipeline.share_outputs()
        tensors = [torch.from_dlpack(output.as_tensor()) for output in outputs]
        self._pipeline.release_outputs()
        return tensors

    def _decoded(self, pending: _Pending, views: list[Tensor]) -> Decoded:
        for number, draws in pending.request.draws.items():
            views[number] = self._make_strong(views[number], draws, self._policies[number])
        for position in pending.bad:
            for view in views:
                view[position] = 0
        return Decoded([view.permute(0, 3, 1, 2) for view in views], pending.bad)  # (B, S, S, 3) -> (B, 3, S, S)

    def _make_strong(self, pixels: Tensor, draws: NDArray[np.float64], policy: Policy) -> Tensor:
        """Make the strong view from pixels: in one call on a GPU, in chunks by several threads on the CPU."""
        if self._policy_workers is None:
            return self._normalize.tensor(apply_policy(pixels, torch.from_numpy(draws), policy))
        view = self._buffers.take(tuple(pixels.shape), np.float32)
        chunks = (slice(start, start + _CHUNK) for start in range(0, len(pixels), _CHUNK))
        array, normalize = pixels.numpy(), self._normalize
        for task in [
            self._policy_workers.submit(strong_view, array[c], draws[c], policy, normalize, view[c]) for c in chunks
        ]:
            task.result()
        return torch.from_numpy(view)

    def _recover(self) -> tuple[_Pending, list[Tensor]]:
        """After an image that DALI cannot decode: run all pending batches again (see the module's docstring)."""
        first, *others = self._running
        self._running.clear()
        self._pipeline = self._build()
        self._run(first)
        try:
            outputs = self._outputs()
        except RuntimeError:
            self._pipeline = self._build()
            outputs = self._run_separately(first)
        for pending in others:
            self._run(pending)
            self._running.append(pending)
        return first, outputs

    def _run_separately(self, pending: _Pending) -> list[Tensor]:
        """Run each sample separately. Samples that DALI cannot decode are decoded here, or marked as bad."""
        samples: list[list[Tensor]] = []
        for position in range(len(pending.encoded)):
            try:
                self._run(pending, slice(position, position + 1))
                samples.append(self._outputs())
            except RuntimeError:
                self._pipeline = self._build()
                index = int(pending.request.index[position])
                self._refused.add(index)
                sample = read_sample(self._split, index, self._max_pixels)
                if isinstance(sample, Encoded):
                    sample = self._as_ppm(index, sample)
                if isinstance(sample, BadSample):
                    pending.bad[position] = sample
                    sample = _PLACEHOLDER
                    for box, _ in pending.boxes:
                        box[position] = (0, 0, 1, 1)
                pending.encoded[position] = np.frombuffer(sample.data, np.uint8)
                self._run(pending, slice(position, position + 1))
                samples.append(self._outputs())
        return [torch.cat(view) for view in zip(*samples, strict=True)]


# DALI gets this instead of a bad sample.
_PLACEHOLDER = Encoded(ppm(BLACK), ImageHeader("ppm", width=1, height=1, orientation=1, plain=True))
