"""The base of all engines: forward pass, gradient clipping, batch statistics, and state as plain tensors.

A weight is named `NAME`, its optimizer state `NAME/KEY`. Full tensors do not depend on the number of ranks or on the
kind of engine, so state saved by one engine loads into any other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Set
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from ...checkpoint.fragments import Fragment
from ...errors import ConfigError, DataError
from ..distributed.world import World
from ..settings import EngineSettings

STEP = "step"  # optimizer state that is a scalar for every parameter: Adam's step count


class Engine(ABC):
    """Forward, backward and step of a network, and its state as plain tensors."""

    def __init__(
        self,
        world: World,
        settings: EngineSettings,
        network: nn.Module,
        wrapped: Any,
        optimizer: Optimizer,
        *,
        clip: float,
    ) -> None:
        """`network` is the plain module, whose parameters have their own names; `wrapped` is what the forward calls."""
        self.world, self.settings = world, settings
        self.network, self._wrapped = network, wrapped
        self._optimizer = optimizer
        self._clip = clip
        self._norm: Tensor | float | None = None
        self._last_finite = {name: buffer.clone() for name, buffer in self.statistics().items()}

    @property
    def stage(self) -> int:
        """The ZeRO stage, 0 to 3; 0 without DeepSpeed."""
        return 0

    def forward(self, *inputs: Tensor) -> Tensor:
        """The network's output in float32, whatever the precision of the computation.

        Collective under ZeRO-3, in evaluation too: every rank must call it equally often.
        """
        if self.settings.channels_last:
            inputs = tuple(
                value.contiguous(memory_format=torch.channels_last) if value.dim() == 4 else value for value in inputs
            )
        output: Tensor = self._wrapped(*inputs)
        return output.float()

    @abstractmethod
    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Enter for the forward and backward pass of a micro-batch; `last` is the one that ends the step."""

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a micro-batch."""

    @abstractmethod
    def step(self) -> bool:
        """Clip, update the weights, zero the gradients. False if the update is known to be skipped.

        A gradient that is not finite never reaches the weights: one sample whose activations overflow is enough to
        cause one, even if its weight in the loss is 0 (0 * inf is not 0). fp16 and ZeRO 1 to 3 skip such an update and
        return False. All other engines set the gradient to 0, which does not wait for the device: momentum and weight
        decay still apply in that step, and True is returned.
        """

    def grad_norm(self) -> float | None:
        """Norm of the last step's gradient before clipping, None if it was not computed. Waits for the device."""
        return None if self._norm is None else float(self._norm)

    def set_lr(self, lr: float, betas: tuple[float, float] | None = None) -> None:
        """Set the learning rate of every parameter group, and Adam's betas."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr
            if betas is not None:
                group["betas"] = betas

    def train(self) -> None:
        """Switch to training mode: batch statistics, dropout."""
        self._wrapped.train()

    def eval(self) -> None:
        """Switch to evaluation mode: running statistics, no dropout. Call `average_statistics` before."""
        self._wrapped.eval()

    # Running batch statistics

    def statistics(self) -> dict[str, Tensor]:
        """This rank's running batch statistics by name: means and variances. Views, not copies."""
        return {
            f"{name}.{kind}" if name else kind: buffer
            for name, module in self.network.named_modules()
            if isinstance(module, nn.modules.batchnorm._NormBase)
            for kind, buffer in (("running_mean", module.running_mean), ("running_var", module.running_var))
            if buffer is not None
        }

    def last_finite_statistics(self) -> dict[str, Tensor]:
        """The statistics as last averaged over the ranks, to which `repair_statistics` resets."""
        return dict(self._last_finite)

    def average_statistics(self) -> None:
        """Set the running batch statistics of all ranks to their mean, before an evaluation and before saving.

        Collective. Between two calls each rank follows its own samples.
        """
        buffers = self.statistics()
        self.average_over_ranks(buffers)
        self._last_finite = {name: buffer.clone() for name, buffer in buffers.items()}

    def average_over_ranks(self, buffers: Mapping[str, Tensor]) -> None:
        """Set buffers, in place, to their mean over all ranks. Collective."""
        if self.world.size > 1 and buffers:
            # In float64, so that the mean of equal values is exactly that value: averaging twice changes nothing.
            flat = torch.cat([buffer.flatten().double() for buffer in buffers.values()])
            distributed.all_reduce(flat)
            parts = (flat / self.world.size).split([buffer.numel() for buffer in buffers.values()])
            for buffer, mean in zip(buffers.values(), parts, strict=True):
                buffer.copy_(mean.view_as(buffer))

    def repair_statistics(self) -> None:
        """Reset running batch statistics that are infinite or NaN to their last average over the ranks.

        Otherwise one bad sample would corrupt them permanently. Training does not use them, but every evaluation does.
        """
        for name, buffer in self.statistics().items():
            buffer.copy_(torch.where(torch.isfinite(buffer), buffer, self._last_finite[name]))

    # State

    def replicated_network(self) -> dict[str, Tensor]:
        """The part of the network's state that is identical on all ranks. Views, not copies.

        This is `state_dict()` without batch statistics and, under ZeRO-3, without the partitioned parameters.
        """
        own = self.statistics().keys() | self._partitioned()
        return {name: value for name, value in self.network.state_dict().items() if name not in own}

    def replicated_optimizer(self) -> dict[str, Tensor]:
        """Optimizer state that is identical on all ranks, as `NAME/KEY`. Views, not copies."""
        return {
            f"{name}/{key}": value.detach()
            for name, parameter in self.network.named_parameters()
            for key, value in self._optimizer.state.get(parameter, {}).items()
            if torch.is_tensor(value)
        }

    def own_fragments(self) -> tuple[dict[str, Fragment], dict[str, Fragment]]:
        """Fragments of the network and of the optimizer state that only this rank holds. Views, not copies."""
        return {}, {}

    def network_state(self) -> dict[str, Tensor]:
        """Full weights and buffers by name, on the CPU, in float32 (integers keep their dtype). Collective."""
        gathered = self._gather_partitioned()
        state = {}
        for name, value in self.network.state_dict().items():
            full = gathered.get(name, value).detach()
            dtype = torch.float32 if full.is_floating_point() else full.dtype
            state[name] = full.to("cpu", dtype, copy=True, memory_format=torch.contiguous_format)
        return state

    def load_network_state(self, state: Mapping[str, Tensor], last_finite: Mapping[str, Tensor] | None = None) -> None:
        """Load the result of `network_state`, saved by any engine on any number of ranks. Collective.

        `last_finite`: batch statistics for `last_finite_statistics`, where they differ from those in the state.
        """
        self._check_network_state(state)
        self._set_network(state)
        last_finite = last_finite or {}
        self._last_finite = {
            name: last_finite.get(name, buffer).clone().to(buffer) for name, buffer in self.statistics().items()
        }

    def load_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        """Load full `NAME/KEY` tensors, saved by any engine on any number of ranks. Collective."""
        shapes = self._shapes()
        for entry, value in state.items():
            name, _, key = entry.rpartition("/")
            if name not in shapes or (key != STEP and value.shape != shapes[name]):
                expected = tuple(shapes[name]) if name in shapes else "no such parameter"
                raise DataError(f"optimizer state: {entry} is {tuple(value.shape)}, the network has {expected}")
        if state and all(entry.rpartition("/")[2] == STEP for entry in state):
            raise DataError(
                f"optimizer state: it has Adam's step count ({STEP}), but not its moments; "
                f"resume from an older checkpoint with --resume PATH"
            )
        self._set_optimizer(state)

    def loss_scale(self) -> dict[str, float]:
        """State of the loss scaler; empty unless precision is fp16. ZeRO 1 to 3 do not expose theirs."""
        scaler = self._enabled_scaler()
        return {} if scaler is None else {key: float(value) for key, value in scaler.state_dict().items()}

    def load_loss_scale(self, scale: Mapping[str, float]) -> None:
        """Load the result of `loss_scale`. Without it the scale starts large and adapts within some steps."""
        scaler = self._enabled_scaler()
        if scaler is not None and scale:
            counts = ("growth_interval", "_growth_tracker")
            scaler.load_state_dict({key: int(scale[key]) if key in counts else scale[key] for key in scale})

    # For the kinds of engines

    @abstractmethod
    def _grad_scaler(self) -> Any:
        """The GradScaler, if there is one."""

    def _partitioned(self) -> Set[str]:
        """Names of the parameters of which this rank holds only a part."""
        return frozenset()

    def _gather_partitioned(self) -> dict[str, Tensor]:
        """Full tensors of the partitioned parameters, on the CPU. Collective."""
        return {}

    def _set_network(self, state: Mapping[str, Tensor]) -> None:
        partitioned = self._partitioned()
        with torch.no_grad():
            for name, value in self.network.state_dict().items():
                if name not in partitioned:
                    value.copy_(state[name])

    def _set_optimizer(self, state: Mapping[str, Tensor]) -> None:
        self._optimizer.state.clear()
        parameters = dict(self.network.named_parameters())
        for entry, value in state.items():
            name, _, key = entry.rpartition("/")
            # Adam's step stays on the CPU, as torch expects. The rest has the device and layout of its parameter.
            mine = value.clone() if key == STEP else torch.empty_like(parameters[name]).copy_(value)
            self._optimizer.state[parameters[name]][key] = mine.detach()

    def _shapes(self) -> dict[str, torch.Size]:
        """Shapes of the full parameters."""
        return {name: weight.shape for name, weight in self.network.named_parameters(remove_duplicate=False)}

    def _tame_gradient(self) -> None:
        """Clip the gradient, which is identical on all ranks, and set it to 0 if it is not finite."""
        scaled = self.settings.precision == "fp16"  # its scaler looks for non-finite gradients, and must see them
        if scaled and not self._clip:
            return
        parameters = [parameter for parameter in self.network.parameters() if parameter.grad is not None]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        self._norm = norm = nn.utils.get_total_norm(gradients)
        if self._clip:
            nn.utils.clip_grads_with_norm_(parameters, self._clip, norm)
        nonfinite = ~norm.isfinite()
        if scaled or (nonfinite.device.type == "cpu" and not nonfinite):  # on a GPU, reading it would wait
            return
        for gradient in gradients:
            gradient.masked_fill_(nonfinite, 0.0)

    def _enabled_scaler(self) -> Any:
        scaler = self._grad_scaler()
        return scaler if scaler is not None and scaler.is_enabled() else None

    def _check_network_state(self, state: Mapping[str, Tensor]) -> None:
        shapes = {name: value.shape for name, value in self.network.state_dict().items()} | self._shapes()
        for name in sorted(shapes.keys() ^ state.keys()):
            where = "the network but not in the state" if name in shapes else "the state but not in the network"
            raise DataError(f"network state: {name} is in {where}; does it belong to another network (model.*)?")
        for name, value in state.items():
            if value.shape != shapes[name]:
                raise DataError(
                    f"network state: {name} is {tuple(value.shape)}, the network has {tuple(shapes[name])}; "
                    f"does it belong to another network or another number of classes?"
                )


def prepare_network(network: nn.Module, world: World, settings: EngineSettings, *, channels_last: bool) -> nn.Module:
    """Convert, move and compile a network before it is wrapped. Its parameters stay the same objects."""
    if settings.sync_batchnorm and world.device.type != "cuda":
        raise ConfigError("engine.sync_batchnorm: needs GPUs, and none was found; set it to false")
    if settings.sync_batchnorm and world.size > 1:
        network = with_synced_statistics(network)
    network = network.to(world.device)
    if channels_last:
        network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if settings.compile:
        # In place, so that names stay as they are. network.compile() silently does nothing to a Sequential.
        network.forward = torch.compile(network.forward)
    return network


def with_synced_statistics(network: nn.Module) -> nn.Module:
    """Make the batch norms compute their statistics over all ranks. The parameters stay the same objects."""
    if any(type(module).__module__.startswith("timm.") for module in network.modules()):
        from ...models.from_timm import with_synced_statistics as with_timm

        return with_timm(network)
    return nn.SyncBatchNorm.convert_sync_batchnorm(network)
