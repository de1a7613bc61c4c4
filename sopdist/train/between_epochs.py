"""What the trainer does for a method between epochs: predictions on the training split, and changes of the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, distributed, nn

from ..data.parts import Part
from ..data.settings import DataSettings
from ..data.stream import Stream
from ..methods import Method, PerSample, Predict
from .distributed.world import World
from .engine import Engine
from .weight_average import WeightAverage


class BetweenEpochs:
    """See `methods.method.Trainer`. The training split is opened for evaluation when first needed."""

    def __init__(
        self,
        data: DataSettings,
        batch: int,
        stream: Stream,
        engine: Engine,
        average: WeightAverage | None,
        method: Method,
        world: World,
        fresh_network: Callable[[], nn.Module],
    ) -> None:
        """`stream` is the training stream; `fresh_network` creates a network with other initial weights."""
        self._data, self._batch, self._training = replace(data, balanced_per_epoch=0), batch, stream
        self._engine, self._average, self._method, self._world = engine, average, method, world
        self._fresh_network = fresh_network
        self._stream: Stream | None = None

    def predictions(
        self, per_sample: PerSample, *, predict: Predict | None = None, samples: NDArray[np.int64] | None = None
    ) -> Tensor:
        """Evaluate every sample, or each of `samples`, once."""
        world, engine = self._world, self._engine
        if self._stream is None:
            self._stream = world.on_all_ranks(self._open)
        engine.average_statistics()
        engine.eval()
        forward = partial(predict or self._method.predict, engine.forward)
        found = collect(forward, self._stream, per_sample, world, samples)
        engine.train()
        return found

    def drawn(self, epoch: int) -> NDArray[np.int64] | None:
        """The samples that `data.balanced_per_epoch` draws for this epoch; None: all."""
        return self._training.drawn(epoch)

    def weights(self) -> dict[str, Tensor]:
        """A copy of all weights and buffers, on the CPU."""
        self._engine.average_statistics()
        return self._engine.network_state()

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Load weights that `weights` returned."""
        self._engine.load_network_state(weights)

    def restart(self) -> None:
        """Load the weights of a fresh network, clear the optimizer state, and reset the average to these weights."""
        network = self._world.on_all_ranks(self._fresh_network)
        self._engine.load_network_state(network.state_dict())
        self._engine.load_optimizer_state({})
        if self._average is not None:
            self._average.reset()

    def close(self) -> None:
        """Stop the threads of the split, if it was opened."""
        if self._stream is not None:
            self._stream.close()

    def _open(self) -> Stream:
        return Stream(self._data, self._batch, rank=self._world.rank, world_size=self._world.size, train=False)


@torch.no_grad()
def collect(
    predict: Callable[[Tensor], Tensor],
    stream: Stream,
    per_sample: PerSample,
    world: World,
    samples: NDArray[np.int64] | None = None,
) -> Tensor:
    """What `per_sample` returns for each sample of the split, (N, ...) on every rank; NaN if it was not evaluated."""
    values: Tensor | None = None
    seen = torch.zeros(len(stream.split), dtype=torch.int32, device=world.device)
    for batch in stream.epoch(parts=(Part(samples),)):
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
