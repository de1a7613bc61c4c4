"""Single process and DDP, wrapped by accelerate: every rank holds the full network and the full optimizer state."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ...errors import ConfigError
from ..distributed.world import World
from ..settings import EngineSettings
from .base import Engine, prepare_network


class DdpEngine(Engine):
    """DDP on several ranks; the bare network on one."""

    def __init__(
        self, world: World, settings: EngineSettings, network: nn.Module, optimizer: Optimizer, *, clip: float
    ) -> None:
        _check_precision(world, settings)
        network = prepare_network(network, world, settings, channels_last=settings.channels_last)
        with warnings.catch_warnings():
            # Newer torch has another name for broadcast_buffers, which accelerate does not use yet.
            warnings.filterwarnings("ignore", ".*broadcast_buffers", FutureWarning)
            wrapped, self._stepper = world.accelerator.prepare(network, optimizer)
        super().__init__(world, settings, network, wrapped, optimizer, clip=clip)

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Enter for the forward and backward pass of a micro-batch. Gradients are reduced in the last one of a step."""
        no_sync: AbstractContextManager[None] = self.world.accelerator.no_sync(self._wrapped)
        return nullcontext() if last else no_sync

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a micro-batch."""
        self.world.accelerator.backward(loss)

    def step(self) -> bool:
        """Clip, update the weights, zero the gradients. False if fp16 skipped the update; see `Engine.step`."""
        if self._clip:
            self.world.accelerator.unscale_gradients()
        self._tame_gradient()
        self._stepper.step()
        self._stepper.zero_grad()
        return not self._stepper.step_was_skipped

    def _grad_scaler(self) -> Any:
        return self.world.accelerator.scaler


def _check_precision(world: World, settings: EngineSettings) -> None:
    """accelerate fixes the precision when the world is opened."""
    opened_with = world.accelerator.mixed_precision
    if opened_with != {"fp32": "no"}.get(settings.precision, settings.precision):
        raise ConfigError(f"engine.precision = {settings.precision}, but the world was opened with {opened_with}")
