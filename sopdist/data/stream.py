"""The stream: turns the plan of an epoch into batches, decoded ahead in the background.

    stream = Stream(DataSettings(root="shards/train", recipe="cifar10"), global_batch=128, seed=0)
    for epoch in range(epochs):
        for batch in stream.epoch(epoch):  # or stream.epoch(epoch, start=step), to resume in the middle
            ...

The batches of an epoch are a pure function of (shards, settings, seed, epoch, global batch): each sample occurs exactly
once, with the same crop, on any number of ranks and after resuming at any step.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import DataError
from .augment.draws import GEOMETRY, POLICY, uniforms
from .augment.policy import POLICY_DRAWS
from .augment.recipes import find_recipe
from .batch import Batch
from .decode.backends import open_decoder
from .decode.request import BadSample, Decoded, Request, Views
from .labels import UNKNOWN
from .manifest import ShardInfo
from .parts import Part, plan_parts
from .plan import (
    NO_SAMPLE,
    Indices,
    Plan,
    balanced_subset,
    evaluation_plan,
    rank_columns,
    shards_in_use,
    training_plan,
    without_padding,
)
from .remote.opening import open_store
from .settings import DataSettings
from .split import Split

_logger = logging.getLogger("sopdist.data")
_MAX_LOGGED = 10  # bad samples per epoch that are logged one by one, and listed in the error that stops the run


class TooManyBadSamplesError(DataError):
    """More samples are unreadable than `data.max_bad_fraction` allows."""


@dataclass(frozen=True)
class StreamStats:
    """Counters of a stream since it was opened."""

    samples: int  # samples yielded, including padding and bad samples
    bad: int  # samples that were unreadable
    waited: float  # seconds that the consumer waited for batches
    held_bytes: int  # memory currently held for batches


class Stream:
    """The batches of one rank. With `train=False`, for evaluation: samples in index order, with a centre crop."""

    def __init__(
        self,
        settings: DataSettings,
        global_batch: int,
        seed: int = 0,
        *,
        rank: int = 0,
        world_size: int = 1,
        train: bool = True,
        views: Views = (None,),
        leading: int = 0,
        widest: int = 0,
    ) -> None:
        """`views`: of every training image, weak (None) or strong, as the policy says.

        If batches have several parts: `leading` is the smallest number of columns of the first part, on which the
        length of an epoch depends, and `widest` the largest number of columns of all parts.
        """
        if not 0 <= seed < 2**64:
            raise DataError(f"seed = {seed}: must be from 0 to 2^64 - 1")
        self.settings = settings
        self.recipe = find_recipe(settings.recipe)
        self._rank, self._ranks = rank, world_size
        self._global_batch, self._seed, self._train = global_batch, seed, train
        self._leading = leading or global_batch
        self._views = tuple(views) if train else (None,)
        widest = widest or global_batch
        columns = rank_columns(widest, rank, world_size)
        store = open_store(
            settings.location, Path(settings.cache) if settings.cache else None, settings.cache_bytes or None
        )
        self.split = Split(store)
        shards = len(self.split.manifest.shards)
        self.split.keep_open(shards_in_use(shards, widest, columns, settings.lanes, settings.block))
        try:
            store.check(self.split.manifest)
            self.labels = self.split.labels(settings.labels)
            batch = columns.stop - columns.start
            self._decoder = open_decoder(self.split, self.recipe, self._views, settings, batch=batch)
        except BaseException:
            self.split.close()
            raise
        weakref.finalize(self, store.close)  # at exit at the latest, and before joining the decoder's threads
        self._closed = False
        self._current: object | None = None  # token of the epoch in progress
        self._samples = self._bad = 0
        self._waited = 0.0

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def epoch_samples(self) -> int:
        """Number of samples of an epoch over all of them, over all ranks. It is the same for all epochs."""
        if not (self._train and self.settings.balanced_per_epoch):
            return len(self.split)
        classes = len(self.split.manifest.classes)
        counts = np.bincount(self.labels.labels[self.labels.labels != UNKNOWN], minlength=classes)
        return int(np.minimum(counts, self.settings.balanced_per_epoch // classes).sum())

    @property
    def steps(self) -> int:
        """Largest number of batches of an epoch: that over all samples. It is the same for all epochs and ranks."""
        return -(-self.epoch_samples // self._leading)

    def drawn(self, epoch: int) -> Indices | None:
        """The samples that `data.balanced_per_epoch` draws for this epoch, ascending; None: all."""
        if not (self._train and self.settings.balanced_per_epoch):
            return None
        classes = len(self.split.manifest.classes)
        return balanced_subset(self.labels.labels, classes, self.settings.balanced_per_epoch, self._seed, epoch)

    def plan(self, epoch: int, parts: Sequence[Part] = (Part(),)) -> Plan:
        """The global batches of an epoch, over all ranks. An evaluation has only one part."""
        if not self._train:
            return evaluation_plan(len(self.split), self._global_batch, parts[0].samples)
        drawn = self.drawn(epoch)

        def plan_part(part: Part, stream: int) -> Plan:
            return training_plan(
                self.split.manifest.firsts, self._seed, epoch, part.columns or self._global_batch,
                subset=part.samples, lanes=self.settings.lanes, block=self.settings.block, stream=stream,
            )  # fmt: skip

        return plan_parts([part if drawn is None else _within(part, drawn) for part in parts], plan_part)

    def epoch(self, epoch: int = 0, start: int = 0, parts: Sequence[Part] = (Part(),)) -> Iterator[Batch]:
        """Iterate over the batches of an epoch from step `start` on. Starting another epoch abandons this one."""
        if self._closed:
            raise DataError(f"{self.split.store.root}: the stream is closed; open a new one")
        plan = self.plan(epoch, parts)
        if not 0 <= start <= plan.steps:
            raise DataError(f"epoch {epoch} has {plan.steps} steps; it cannot start at step {start}")
        self.split.store.expect(self._upcoming_shards(plan.batches[start:, self._columns(plan)]))
        return self._batches(epoch, plan, start)

    def _batches(self, epoch: int, plan: Plan, start: int) -> Iterator[Batch]:
        self._decoder.discard()
        self._current = current = object()
        bad: dict[int, BadSample] = {}
        allowed = self.allowed_bad(plan)
        columns = self._columns(plan)
        part = None if plan.part_of_column is None else torch.from_numpy(plan.part_of_column[columns])
        ahead: deque[tuple[Request, NDArray[np.float32]]] = deque()
        steps = iter(range(start, plan.steps))
        try:
            while True:
                for step in islice(steps, self.settings.prefetch + 1 - len(ahead)):
                    ahead.append(self._submit(epoch, plan.batches[step].astype(np.int64), columns))
                if not ahead:
                    return
                request, weight = ahead.popleft()
                started = time.perf_counter()
                decoded = self._decoder.collect()
                self._waited += time.perf_counter() - started
                # A sample repeated as padding is counted at its own position, possibly on another rank.
                own = [sample for position, sample in decoded.bad.items() if weight[position] > 0]
                self._count_bad(own, bad, allowed, epoch)
                yield self._batch(request, weight, decoded, part)
                if self._current is not current:
                    raise DataError(
                        f"epoch {epoch} was abandoned: another epoch was started, or the stream was closed; "
                        "start it again"
                    )
        finally:
            if self._current is current:
                self._current = None
                self._decoder.discard()

    def stats(self) -> StreamStats:
        """Counters since the stream was opened."""
        return StreamStats(self._samples, self._bad, self._waited, self._decoder.held_bytes())

    def close(self) -> None:
        """Stop all threads and close all files."""
        self._closed, self._current = True, None
        self.split.store.close()  # first, because threads may be waiting for a download
        self._decoder.close()
        self.split.close()

    def _columns(self, plan: Plan) -> slice:
        """This rank's columns of the batches."""
        return rank_columns(plan.batches.shape[1], self._rank, self._ranks)

    def _submit(self, epoch: int, batch: Indices, columns: slice) -> tuple[Request, NDArray[np.float32]]:
        """Start decoding this rank's columns of a global batch."""
        index = without_padding(batch)[columns]
        weight = (batch[columns] != NO_SAMPLE).astype(np.float32)
        views = range(len(self._views)) if self._train else ()
        draws = {
            view: uniforms(self._seed, epoch, index, view, POLICY)[:, :POLICY_DRAWS]
            for view, policy in enumerate(self._views)
            if policy is not None
        }
        request = Request(index, tuple(uniforms(self._seed, epoch, index, view, GEOMETRY) for view in views), draws)
        self._decoder.submit(request)
        return request, weight

    def _batch(
        self, request: Request, weight: NDArray[np.float32], decoded: Decoded, part: torch.Tensor | None
    ) -> Batch:
        labels = self.labels.labels[request.index].astype(np.int64)
        weight[labels == UNKNOWN] = 0
        weight[list(decoded.bad)] = 0
        labels[labels == UNKNOWN] = 0
        views = [view[:, :1] for view in decoded.views] if self.recipe.grey else decoded.views
        self._samples += len(labels)
        given, index, counts = (torch.from_numpy(column) for column in (labels, request.index, weight))
        return Batch(views[0], given, index, counts, other_views=tuple(views[1:]), part=part)

    def allowed_bad(self, plan: Plan) -> int:
        """How many samples of an epoch may be unreadable, over all ranks. A rank counts only its own bad samples."""
        # At least as many as among all samples: a method that chooses samples may keep all that are unreadable.
        samples = max(int(np.count_nonzero(plan.batches != NO_SAMPLE)), self.epoch_samples)
        return int(self.settings.max_bad_fraction * samples)

    def _count_bad(self, new: Sequence[BadSample], bad: dict[int, BadSample], allowed: int, epoch: int) -> None:
        """Log new bad samples, and raise once there are more than allowed."""
        for sample in new:
            if sample.index not in bad:
                bad[sample.index] = sample
                self._bad += 1
                if len(bad) <= _MAX_LOGGED:
                    _logger.warning("skipped unreadable sample: %s: %s", sample.where, sample.reason)
        if len(bad) > allowed:
            named = "".join(f"\n  {sample.where}: {sample.reason}" for sample in list(bad.values())[:_MAX_LOGGED])
            raise TooManyBadSamplesError(
                f"{self.split.store.root}: {len(bad)} samples could not be read in epoch {epoch}; "
                f"data.max_bad_fraction = {self.settings.max_bad_fraction} allows {allowed}:{named}\n"
                f"`sopdist verify --decode` lists all of them"
            )

    def _upcoming_shards(self, batches: NDArray[np.integer]) -> Iterator[ShardInfo]:
        """The shards of these samples, in order of first use."""
        index = batches.reshape(-1).astype(np.int64)
        shards, first_use = np.unique(self.split.manifest.shard_of(index[index != NO_SAMPLE]), return_index=True)
        for shard in shards[np.argsort(first_use)].tolist():
            yield self.split.manifest.shards[shard]


def _within(part: Part, drawn: Indices) -> Part:
    """The samples of the part that were drawn."""
    samples = drawn if part.samples is None else np.intersect1d(drawn, part.samples, assume_unique=True)
    return replace(part, samples=samples)
