"""Predictions on the training split, between epochs, for methods that choose samples by them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, distributed

from ..data.settings import DataSettings
from ..data.stream import Stream
from ..methods import Method, PerSample
from .distributed.world import World
from .engine import Engine


class TrainingPredictions:
    """See `methods.method.Predictions`. The split is opened when it is first needed."""

    def __init__(self, data: DataSettings, batch: int, engine: Engine, method: Method, world: World) -> None:
        self._data, self._batch = replace(data, balanced_per_epoch=0), batch
        self._engine, self._method, self._world = engine, method, world
        self._stream: Stream | None = None

    def __call__(self, per_sample: PerSample) -> Tensor:
        """Evaluate every sample once, with the transform of an evaluation; see `methods.method.Predictions`."""
        world, engine = self._world, self._engine
        if self._stream is None:
            self._stream = world.on_all_ranks(self._open)
        engine.average_statistics()
        engine.eval()
        found = collect(partial(self._method.predict, engine.forward), self._stream, per_sample, world)
        engine.train()
        return found

    def close(self) -> None:
        """Stop the threads of the split, if it was opened."""
        if self._stream is not None:
            self._stream.close()

    def _open(self) -> Stream:
        return Stream(self._data, self._batch, rank=self._world.rank, world_size=self._world.size, train=False)


@torch.no_grad()
def collect(predict: Callable[[Tensor], Tensor], stream: Stream, per_sample: PerSample, world: World) -> Tensor:
    """What `per_sample` returns for each sample of the split, (N, ...) on every rank; NaN for unreadable samples."""
    values: Tensor | None = None
    seen = torch.zeros(len(stream.split), dtype=torch.int32, device=world.device)
    for batch in stream.epoch():
        on_device = batch.to(world.device)
        found = per_sample(predict(on_device.images).float(), on_device.labels).float()  # (B, ...)
        if values is None:
            values = torch.zeros(len(seen), *found.shape[1:], device=world.device)
        counts = on_device.weight > 0  # not padding
        values[on_device.index[counts]], seen[on_device.index[counts]] = found[counts], 1
    assert values is not None
    if world.size > 1:  # each sample was computed by one rank, and the others add 0: the sums are exact
        distributed.all_reduce(values)
        distributed.all_reduce(seen)
    values[seen == 0] = torch.nan
    return values
