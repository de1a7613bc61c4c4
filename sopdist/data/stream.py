"""The stream: from the plan of an epoch to batches, decoded ahead in the background.

    stream = Stream(DataSettings(root="shards/train", recipe="cifar10"), global_batch=128, seed=0)
    for epoch in range(epochs):
        for batch in stream.epoch(epoch):  # or stream.epoch(epoch, start=step), to go on in the middle
            ...

The batches of an epoch are a pure function of (shards, settings, seed, epoch, global batch): each sample stands in
exactly one, with the same crop, on any number of ranks and after a resume at any step.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from numpy.typing import NDArray

from .augment.draws import GEOMETRY, POLICY, uniforms
from .augment.policy import POLICY_DRAWS, Policy
from .augment.recipes import find_recipe
from .batch import Batch
from .decode.backends import open_decoder
from .decode.request import BadSample, Decoded, Request
from .errors import DataError
from .labels import UNKNOWN
from .manifest import ShardInfo
from .plan import (
    NO_SAMPLE,
    Indices,
    Plan,
    balanced_subset,
    evaluation_plan,
    rank_columns,
    shards_in_use,
    training_plan,
    without_gaps,
)
from .remote.opening import open_store
from .settings import DataSettings
from .split import Split

_logger = logging.getLogger("sopdist.data")
_MOST_NAMED = 10  # bad samples that are logged one by one in an epoch, and named when the run stops


class TooManyBadSamplesError(DataError):
    """More samples are unreadable than `data.max_bad_fraction` allows."""


@dataclass(frozen=True)
class StreamStats:
    """What the stream has cost so far."""

    samples: int  # handed out, gaps and bad ones included
    bad: int  # of these unreadable
    waited: float  # seconds that the consumer waited for batches
    held_bytes: int  # memory held for batches now


class Stream:
    """Batches of one rank. `train=False` gives the evaluation's: each sample once, in index order, central crop."""

    def __init__(
        self,
        settings: DataSettings,
        global_batch: int,
        seed: int = 0,
        *,
        rank: int = 0,
        world_size: int = 1,
        train: bool = True,
        strong: Policy | None = None,
    ) -> None:
        if not 0 <= seed < 2**64:
            raise DataError(f"seed = {seed}: must be from 0 to 2^64 - 1")
        self.settings = settings
        self.recipe = find_recipe(settings.recipe)
        self._columns = rank_columns(global_batch, rank, world_size)
        self._global_batch, self._seed, self._train = global_batch, seed, train
        self._strong = strong if train else None
        store = open_store(
            settings.location, Path(settings.cache) if settings.cache else None, settings.cache_bytes or None
        )
        self.split = Split(store)
        shards = len(self.split.manifest.shards)
        self.split.keep_open(shards_in_use(shards, global_batch, self._columns, settings.lanes, settings.block))
        try:
            store.check(self.split.manifest)
            self.labels = self.split.labels(settings.labels)
            batch = self._columns.stop - self._columns.start
            self._decoder = open_decoder(
                self.split, self.recipe, self._strong, settings, batch=batch, views=self._views
            )
        except BaseException:
            self.split.close()
            raise
        weakref.finalize(self, store.close)  # at exit at the latest, and before the decoder's threads are waited for
        self._closed = False
        self._running: object | None = None  # the epoch under way
        self._samples = self._bad = 0
        self._waited = 0.0

    @property
    def _views(self) -> int:
        return 1 if self._strong is None else 2

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def steps(self) -> int:
        """Batches of an epoch, which is the same number for all epochs and ranks."""
        samples = len(self.split)
        if self._train and self.settings.balanced_per_epoch:
            classes = len(self.split.manifest.classes)
            counts = np.bincount(self.labels.labels[self.labels.labels != UNKNOWN], minlength=classes)
            samples = int(np.minimum(counts, self.settings.balanced_per_epoch // classes).sum())
        return -(-samples // self._global_batch)

    def plan(self, epoch: int) -> Plan:
        """Which samples all ranks see in an epoch, row by row."""
        if not self._train:
            return evaluation_plan(len(self.split), self._global_batch)
        subset = None
        if self.settings.balanced_per_epoch:
            classes = len(self.split.manifest.classes)
            subset = balanced_subset(self.labels.labels, classes, self.settings.balanced_per_epoch, self._seed, epoch)
        return training_plan(
            self.split.manifest.firsts, self._seed, epoch, self._global_batch,
            subset=subset, lanes=self.settings.lanes, block=self.settings.block,
        )  # fmt: skip

    def epoch(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from step `start` on. One epoch at a time: a new one ends the one before."""
        if self._closed:
            raise DataError(f"{self.split.store.root}: the stream is closed; open a new one")
        plan = self.plan(epoch)
        if not 0 <= start <= plan.steps:
            raise DataError(f"epoch {epoch} has {plan.steps} steps; it cannot start at step {start}")
        self.split.store.expect(self._shards_to_come(plan.rows[start:]))
        return self._batches(epoch, plan, start)

    def _batches(self, epoch: int, plan: Plan, start: int) -> Iterator[Batch]:
        self._decoder.discard()
        self._running = running = object()
        bad: dict[int, BadSample] = {}
        allowed = self.allowed_bad(plan)
        ahead: deque[tuple[Request, NDArray[np.float32]]] = deque()
        steps = iter(range(start, plan.steps))
        try:
            while True:
                for step in islice(steps, self.settings.prefetch + 1 - len(ahead)):
                    ahead.append(self._submit(epoch, plan.rows[step].astype(np.int64)))
                if not ahead:
                    return
                request, weight = ahead.popleft()
                begun = time.perf_counter()
                decoded = self._decoder.collect()
                self._waited += time.perf_counter() - begun
                # What stands in a gap again belongs to another place, perhaps of another rank, and is counted there.
                own = [sample for place, sample in decoded.bad.items() if weight[place] > 0]
                self._count_bad(own, bad, allowed, epoch)
                yield self._batch(request, weight, decoded)
                if self._running is not running:
                    raise DataError(f"epoch {epoch} was left for another one, or the stream was closed; start it again")
        finally:
            if self._running is running:
                self._running = None
                self._decoder.discard()

    def stats(self) -> StreamStats:
        """What the stream has cost so far."""
        return StreamStats(self._samples, self._bad, self._waited, self._decoder.held_bytes())

    def close(self) -> None:
        """Stop all threads and close all files."""
        self._closed, self._running = True, None
        self.split.store.close()  # first: threads may be waiting for a download
        self._decoder.close()
        self.split.close()

    def _submit(self, epoch: int, row: Indices) -> tuple[Request, NDArray[np.float32]]:
        """Start decoding this rank's part of a row of the plan."""
        index = without_gaps(row)[self._columns]
        weight = (row[self._columns] != NO_SAMPLE).astype(np.float32)
        views = range(self._views) if self._train else ()
        draws = None
        if self._strong is not None:
            draws = uniforms(self._seed, epoch, index, 1, POLICY)[:, :POLICY_DRAWS]
        request = Request(index, tuple(uniforms(self._seed, epoch, index, view, GEOMETRY) for view in views), draws)
        self._decoder.submit(request)
        return request, weight

    def _batch(self, request: Request, weight: NDArray[np.float32], decoded: Decoded) -> Batch:
        labels = self.labels.labels[request.index].astype(np.int64)
        weight[labels == UNKNOWN] = 0
        weight[list(decoded.bad)] = 0
        labels[labels == UNKNOWN] = 0
        views = [view[:, :1] for view in decoded.views] if self.recipe.grey else decoded.views
        self._samples += len(labels)
        return Batch(
            views[0], torch.from_numpy(labels), torch.from_numpy(request.index), torch.from_numpy(weight), *views[1:]
        )

    def allowed_bad(self, plan: Plan) -> int:
        """How many samples of an epoch may be unreadable, over all ranks. Each rank knows its own bad ones only."""
        return int(self.settings.max_bad_fraction * np.count_nonzero(plan.rows != NO_SAMPLE))

    def _count_bad(self, new: Sequence[BadSample], bad: dict[int, BadSample], allowed: int, epoch: int) -> None:
        """Log what is bad, and stop when it is too much."""
        for sample in new:
            if sample.index not in bad:
                bad[sample.index] = sample
                self._bad += 1
                if len(bad) <= _MOST_NAMED:
                    _logger.warning("skipped a sample: %s: %s", sample.where, sample.reason)
        if len(bad) > allowed:
            named = "".join(f"\n  {sample.where}: {sample.reason}" for sample in list(bad.values())[:_MOST_NAMED])
            raise TooManyBadSamplesError(
                f"{self.split.store.root}: {len(bad)} samples could not be read in epoch {epoch}, "
                f"data.max_bad_fraction = {self.settings.max_bad_fraction} allows {allowed}:{named}\n"
                f"`sopdist verify --decode` lists all of them"
            )

    def _shards_to_come(self, rows: NDArray[np.integer]) -> Iterator[ShardInfo]:
        """The shards that this rank will read, in the order of their first use."""
        index = rows[:, self._columns].reshape(-1).astype(np.int64)
        shards, first_use = np.unique(self.split.manifest.shard_of(index[index != NO_SAMPLE]), return_index=True)
        for number in shards[np.argsort(first_use)].tolist():
            yield self.split.manifest.shards[number]
