"""DeepSpeed, ZeRO stage 0 to 3. The engine writes DeepSpeed's config; `zero` reads and sets partitioned state."""

from __future__ import annotations

from collections.abc import Mapping, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...checkpoint.fragments import Fragment
from ..distributed.world import World
from ..settings import EngineSettings
from . import zero
from .base import Engine, prepare_network

_MAX_BUCKET = 50_000_000  # elements that DeepSpeed sends at once; it allocates memory for as many


class DeepSpeedEngine(Engine):
    """Stage 0 replicates everything. Stage 1 partitions the optimizer state, 2 the gradients too, 3 the weights too."""

    def __init__(
        self,
        world: World,
        settings: EngineSettings,
        network: nn.Module,
        optimizer: Optimizer,
        *,
        accumulate: int,
        clip: float,
        batch: int,
    ) -> None:
        network = prepare_network(network, world, settings, channels_last=False)
        _complete_config(world, settings, network, accumulate, clip, batch)
        wrapped, _ = world.accelerator.prepare(network, optimizer)
        if settings.channels_last and not settings.zero:
            # Not earlier: DeepSpeed cannot broadcast such weights. ZeRO flattens them: channels_last inputs suffice.
            network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        super().__init__(world, settings, network, wrapped, optimizer, clip=clip)

    @property
    def stage(self) -> int:
        """The ZeRO stage, 0 to 3."""
        return self.settings.zero

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Enter for the forward and backward pass of a micro-batch.

        Gradients are reduced in the last one of a step; ZeRO 2 and 3 reduce them in every one.
        """
        self._wrapped.set_gradient_accumulation_boundary(is_boundary=last)
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a micro-batch."""
        self._wrapped.backward(loss, scale_wrt_gas=False)

    def step(self) -> bool:
        """Clip, update the weights, zero the gradients. False if DeepSpeed skipped the update; see `Engine.step`."""
        if self.stage == 0:  # ZeRO 1 to 3 clip and check the gradient themselves; stage 0 would not report its norm
            scaler = self._grad_scaler()
            if self._clip and scaler is not None:
                scaler.unscale_(self._optimizer)
            self._tame_gradient()
        self._wrapped.step()
        if self.stage:
            self._norm = self._wrapped.get_global_grad_norm()
        return not getattr(self._wrapped.optimizer, "overflow", False)

    def replicated_optimizer(self) -> dict[str, Tensor]:
        """Optimizer state as `NAME/KEY`. Empty under ZeRO 1 to 3, which partition all of it."""
        return {} if self.stage else super().replicated_optimizer()

    def own_fragments(self) -> tuple[dict[str, Fragment], dict[str, Fragment]]:
        """Fragments of the network (`NAME`) and of the optimizer state (`NAME/KEY`) that only this rank holds."""
        return zero.own_fragments(self._wrapped, self.network) if self.stage else ({}, {})

    def _partitioned(self) -> Set[str]:
        return self._shapes().keys() if self.stage == 3 else frozenset()

    def _gather_partitioned(self) -> dict[str, Tensor]:
        return zero.gather_weights(self.network) if self.stage == 3 else {}

    def _set_network(self, state: Mapping[str, Tensor]) -> None:
        if self.stage == 3:
            zero.set_weights(self.network, state)
        super()._set_network(state)
        if self.stage:
            zero.refresh_master_weights(self._wrapped)

    def _set_optimizer(self, state: Mapping[str, Tensor]) -> None:
        if self.stage:
            zero.set_optimizer_state(self._wrapped, self.network, state)
        else:
            super()._set_optimizer(state)

    def _grad_scaler(self) -> Any:
        return getattr(self._wrapped, "torch_autocast_z0_gradscaler", None)  # ZeRO 1 to 3 do not expose theirs

    def _shapes(self) -> dict[str, torch.Size]:
        weights = self.network.named_parameters(remove_duplicate=False)
        return {name: getattr(weight, "ds_shape", weight.shape) for name, weight in weights}


def _complete_config(
    world: World, settings: EngineSettings, network: nn.Module, accumulate: int, clip: float, batch: int
) -> None:
    """Replace the placeholder config that `open_world` passed to accelerate."""
    weights = sum(parameter.numel() for parameter in network.parameters())
    bucket = min(_MAX_BUCKET, weights + weights % 2)  # DeepSpeed requires an even number
    world.accelerator.gradient_accumulation_steps = accumulate
    config = {
        "train_micro_batch_size_per_gpu": max(1, batch),
        "train_batch_size": max(1, batch) * accumulate * world.size,
        "gradient_accumulation_steps": accumulate,
        "gradient_clipping": clip if settings.zero else 0.0,
        "zero_optimization": {
            "stage": settings.zero, "reduce_bucket_size": bucket, "allgather_bucket_size": bucket,
        },
        "zero_allow_untested_optimizer": True,  # DeepSpeed has tested its own optimizers only
        "steps_per_print": 10**12,
    }  # fmt: skip
    if settings.precision != "fp32":
        # Weights stay float32, as under DDP. So do gradients when they are reduced, hence the empty list.
        dtype = {"bf16": "bfloat16", "fp16": "float16"}[settings.precision]
        config["torch_autocast"] = {"enabled": True, "dtype": dtype, "lower_precision_safe_modules": []}
    plugin_config = world.accelerator.state.deepspeed_plugin.deepspeed_config
    plugin_config.clear()
    plugin_config.update(config)
