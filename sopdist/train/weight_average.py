"""A moving average of the weights (`train.ema`), for any method: evaluated and saved beside the network itself.

Every rank averages its full copy of the weights, which is the same on all of them, and its own batch statistics.
ZeRO-3, where no rank has full weights, is refused when the config is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from .engine import Engine


class WeightAverage:
    """The average of the weights and buffers of an engine's network."""

    def __init__(self, engine: Engine, decay: float) -> None:
        self._engine, self._decay = engine, decay
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Restart from the current weights."""
        self.weights = {name: value.detach().clone() for name, value in self._engine.replicated_network().items()}
        self.statistics = {name: value.clone() for name, value in self._engine.statistics().items()}

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the network. Call it after every step."""
        pairs = [(self.weights[name], value) for name, value in self._engine.replicated_network().items()]
        pairs += [(self.statistics[name], value) for name, value in self._engine.statistics().items()]
        moved = [(average, current) for average, current in pairs if average.is_floating_point()]
        averages, currents = ([pair[side] for pair in moved] for side in (0, 1))
        torch._foreach_lerp_(averages, currents, 1 - self._decay)
        for average, current in pairs:
            if not average.is_floating_point():
                average.copy_(current)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Give the network the averaged weights until the context ends. Collective."""
        engine = self._engine
        raw = {name: value.detach().clone() for name, value in self._current().items()}
        try:
            self._set(self.weights | self.statistics)
            engine.average_over_ranks(engine.statistics())
            yield
        finally:
            self._set(raw)

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor], statistics: Mapping[str, Tensor]) -> None:
        """Load what was saved; ValueError if it belongs to another network."""
        for here, there in ((self.weights, weights), (self.statistics, statistics)):
            for name in sorted(here.keys() ^ there.keys()):
                raise ValueError(f"the average of the weights: {name} is missing, or belongs to another network")
            for name, value in here.items():
                value.copy_(there[name])

    def _current(self) -> dict[str, Tensor]:
        return {**self._engine.replicated_network(), **self._engine.statistics()}

    @torch.no_grad()
    def _set(self, values: Mapping[str, Tensor]) -> None:
        for name, value in self._current().items():
            value.copy_(values[name])
