"""The engine: one network on all ranks, whichever way it is spread (single, DDP, DeepSpeed ZeRO 0 to 3).

    engine = Engine(world, config.engine, network, optimizer, accumulate=2, clip=1.0, batch=64)
    for last, piece in ...:
        with engine.piece(last):
            engine.backward(loss_of(engine.forward(piece.images)))
    engine.step()

What is minimised is the mean over ranks of the sum over pieces of the losses given to `backward`, whatever the engine.
A rank's loss is therefore (sum of its weighted losses) * ranks / (total weight over ranks): rank 0 with losses 1, 2 and
rank 1 with loss 6 give 3 * 2 / 3 = 2 and 6 * 2 / 3 = 4, whose mean is 3, the mean of the three samples.

Knows no data, no objective and no files.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from ..checkpoint.pieces import Piece
from ..config import ConfigError
from ..data.errors import DataError
from . import zero
from .settings import EngineSettings
from .world import World

_LARGEST_BUCKET = 50_000_000  # numbers that DeepSpeed puts together to send; it reserves memory for as many


class Engine:
    """Forward, backward and step of a network, and its state as plain tensors."""

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
        self.world, self.settings = world, settings
        self.network = _prepared(network, world, settings)  # the plain module: its parameters have their own names
        self._optimizer = optimizer
        self._clip, self._norm = clip, None  # type: float, Tensor | float | None
        if world.kind == "deepspeed":
            _complete_deepspeed_config(world, settings, self.network, accumulate, clip, batch)
        with warnings.catch_warnings():
            # Newer torch has another word for broadcast_buffers, which accelerate does not know yet.
            warnings.filterwarnings("ignore", ".*broadcast_buffers", FutureWarning)
            prepared = world.accelerator.prepare(self.network, optimizer)
        if settings.channels_last and world.kind == "deepspeed" and not settings.zero:
            # Only now: DeepSpeed cannot broadcast such weights, and ZeRO cuts them up. Images are enough for it.
            self.network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._wrapped: Any = prepared[0]
        self._stepper: Any = prepared[1]
        self._sound = [buffer.clone() for buffer in self._statistics()]  # finite ones, to go back to

    @property
    def stage(self) -> int:
        """What DeepSpeed has partitioned, 0 to 3."""
        return self.settings.zero if self.world.kind == "deepspeed" else 0

    def forward(self, images: Tensor) -> Tensor:
        """Logits in float32, of whatever precision is computed in.

        Under ZeRO-3 collective in evaluation too: every rank must call it equally often.
        """
        if self.settings.channels_last and images.dim() == 4:
            images = images.contiguous(memory_format=torch.channels_last)
        logits: Tensor = self._wrapped(images)
        return logits.float()

    def piece(self, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of a piece of a step. Gradients travel with the last one (ZeRO 2, 3: always)."""
        if self.world.kind == "deepspeed":
            self._wrapped.set_gradient_accumulation_boundary(is_boundary=last)
            return nullcontext()
        no_sync: AbstractContextManager[None] = self.world.accelerator.no_sync(self._wrapped)
        return nullcontext() if last else no_sync

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a piece."""
        if self.world.kind == "deepspeed":
            self._wrapped.backward(loss, scale_wrt_gas=False)
        else:
            self.world.accelerator.backward(loss)

    def step(self) -> bool:
        """Clip, update the weights, clear the gradients. False if the update is known to be left out.

        A gradient that is not finite never reaches the weights: one sample whose activations overflow is enough for
        one, even if it has no part in the loss (0 * inf is not 0). fp16 and ZeRO 1 to 3 leave such an update out, and
        say so. In all other cases the gradient is taken as 0, which needs no waiting for the device: momentum and
        weight decay go on for that step, and True is returned.
        """
        if self.world.kind == "deepspeed":
            return self._deepspeed_step()
        if self._clip:
            self.world.accelerator.unscale_gradients()
        self._tame_gradient()
        self._stepper.step()
        self._stepper.zero_grad()
        return not self._stepper.step_was_skipped

    def _tame_gradient(self) -> None:
        """Clip the gradient, which is the same on all ranks, and make it 0 if it is not finite."""
        scaled = self.settings.precision == "fp16"  # its scaler finds by itself what is not finite, and must see it
        if scaled and not self._clip:
            return
        parameters = [parameter for parameter in self.network.parameters() if parameter.grad is not None]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        self._norm = nn.utils.get_total_norm(gradients)
        if self._clip:
            nn.utils.clip_grads_with_norm_(parameters, self._clip, self._norm)
        broken = ~self._norm.isfinite()
        if scaled or (broken.device.type == "cpu" and not broken):  # to ask a GPU would be to wait for it
            return
        for gradient in gradients:
            gradient.masked_fill_(broken, 0.0)

    def _deepspeed_step(self) -> bool:
        if self.stage == 0:  # with ZeRO DeepSpeed does it; without, it would neither tell the norm nor look at it
            scaler = getattr(self._wrapped, "torch_autocast_z0_gradscaler", None)
            if self._clip and scaler is not None:
                scaler.unscale_(self._optimizer)
            self._tame_gradient()
        self._wrapped.step()
        if self.stage:
            self._norm = self._wrapped.get_global_grad_norm()
        return not getattr(self._wrapped.optimizer, "overflow", False)

    def grad_norm(self) -> float | None:
        """Norm of the last step's gradient before clipping; None if no one had to compute it. Waits for the device."""
        return None if self._norm is None else float(self._norm)

    def set_lr(self, rate: float) -> None:
        """The learning rate from now on."""
        for group in self._optimizer.param_groups:
            group["lr"] = rate

    def train(self) -> None:
        """Batch statistics, dropout."""
        self._wrapped.train()

    def eval(self) -> None:
        """Running statistics, no dropout. Call `average_statistics` before."""
        self._wrapped.eval()

    def average_statistics(self) -> None:
        """Give all ranks the mean of their running batch statistics: before an evaluation and before saving.

        Collective. Between two calls each rank follows its own samples.
        """
        buffers = self._statistics()
        if self.world.size > 1 and buffers:
            # In float64, so that the mean of equal ones is exactly what they are: averaging twice is averaging once.
            flat = torch.cat([buffer.flatten().double() for buffer in buffers])
            distributed.all_reduce(flat)
            parts = (flat / self.world.size).split([buffer.numel() for buffer in buffers])
            for buffer, mean in zip(buffers, parts, strict=True):
                buffer.copy_(mean.view_as(buffer))
        self._sound = [buffer.clone() for buffer in buffers]

    def repair_statistics(self) -> None:
        """Running batch statistics that a sample has made infinite or NaN become what they last were on average.

        One such sample would spoil them for good. Training does not look at them, but every evaluation does.
        """
        for buffer, sound in zip(self._statistics(), self._sound, strict=True):
            buffer.copy_(torch.where(torch.isfinite(buffer), buffer, sound))

    def statistics(self) -> dict[str, Tensor]:
        """The running batch statistics by name, which are this rank's own: means and variances."""
        return {
            f"{name}.{kind}" if name else kind: buffer
            for name, module in self.network.named_modules()
            if isinstance(module, nn.modules.batchnorm._NormBase)
            for kind, buffer in (("running_mean", module.running_mean), ("running_var", module.running_var))
            if buffer is not None
        }

    def _statistics(self) -> list[Tensor]:
        return list(self.statistics().values())

    def common_state(self) -> dict[str, Tensor]:
        """What all ranks have alike of network and optimizer, by name: views, not copies.

        `network/NAME`, `optimizer/NAME/KEY`, and `sound/NAME`: statistics as they last were on average.
        """
        statistics = self.statistics()
        own = statistics.keys() | (self._shapes().keys() if self.stage == 3 else set())
        state = {f"network/{name}": value for name, value in self.network.state_dict().items() if name not in own}
        state |= {f"sound/{name}": value for name, value in zip(statistics, self._sound, strict=True)}
        if self.stage:
            return state
        return state | {f"optimizer/{name}": value for name, value in self._kept_by_optimizer().items()}

    def own_state(self) -> dict[str, Piece]:
        """What only this rank has of network and optimizer: views, not copies. Named as in `common_state`."""
        if not self.stage:
            return {}
        return zero.own_pieces(self._wrapped, self.network)

    def network_state(self) -> dict[str, Tensor]:
        """All weights and buffers by name, whole, on the CPU, float32 (counters as they are). Collective."""
        weights = zero.whole_weights(self.network) if self.stage == 3 else {}
        state = {}
        for name, value in self.network.state_dict().items():
            whole = weights.get(name, value).detach()
            kept = torch.float32 if whole.is_floating_point() else whole.dtype
            state[name] = whole.to("cpu", kept, copy=True, memory_format=torch.contiguous_format)
        return state

    def load_network_state(self, state: Mapping[str, Tensor], sound: Mapping[str, Tensor] | None = None) -> None:
        """Take over what `network_state` gave, under any engine and on any number of ranks. Collective.

        `sound`: batch statistics to go back to, if they are others than those of the state.
        """
        self._check_network_state(state)
        if self.stage == 3:
            zero.set_whole_weights(self.network, state)
        own = self.network.state_dict()
        partitioned = (
            {name for name, _ in self.network.named_parameters(remove_duplicate=False)} if self.stage == 3 else set()
        )
        with torch.no_grad():
            for name, value in own.items():
                if name not in partitioned:
                    value.copy_(state[name])
        if self.stage:
            zero.renew_masters(self._wrapped)
        sound = sound or {}
        self._sound = [sound.get(name, buffer).clone().to(buffer) for name, buffer in self.statistics().items()]

    def _kept_by_optimizer(self) -> dict[str, Tensor]:
        return {
            f"{name}/{key}": value.detach()
            for name, parameter in self.network.named_parameters()
            for key, value in self._optimizer.state.get(parameter, {}).items()
            if torch.is_tensor(value)
        }

    def load_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        """Take over whole `NAME/KEY` tensors, of any engine and any number of ranks. Collective."""
        shapes = self._shapes()
        for entry, value in state.items():
            name, _, key = entry.rpartition("/")
            if name not in shapes or (key != zero.COUNT and value.shape != shapes[name]):
                expected = tuple(shapes[name]) if name in shapes else "no such parameter"
                raise DataError(f"optimizer state: {entry} is {tuple(value.shape)}, the network has {expected}")
        if state and all(entry.rpartition("/")[2] == zero.COUNT for entry in state):
            raise DataError(
                f"optimizer state: there is Adam's count of steps ({zero.COUNT}), but not its moments; "
                f"--resume PATH goes on from an older checkpoint"
            )
        if self.stage:
            zero.set_whole_optimizer_state(self._wrapped, self.network, state)
            return
        self._optimizer.state.clear()
        parameters = dict(self.network.named_parameters())
        for entry, value in state.items():
            name, _, key = entry.rpartition("/")
            # Adam's step stays on the CPU, as torch wants it; all else lies where its parameter does, and as it does.
            mine = value.clone() if key == zero.COUNT else torch.empty_like(parameters[name]).copy_(value)
            self._optimizer.state[parameters[name]][key] = mine.detach()

    def loss_scale(self) -> dict[str, float]:
        """By what the loss is scaled, and how that goes on: of fp16 only. ZeRO 1 to 3 keep theirs to themselves."""
        scaler = self._scaler()
        return {} if scaler is None else {key: float(value) for key, value in scaler.state_dict().items()}

    def load_loss_scale(self, scale: Mapping[str, float]) -> None:
        """Take over what `loss_scale` gave. Without it the scale begins large and is found again within some steps."""
        scaler = self._scaler()
        if scaler is not None and scale:
            counts = ("growth_interval", "_growth_tracker")
            scaler.load_state_dict({key: int(scale[key]) if key in counts else scale[key] for key in scale})

    def _scaler(self) -> Any:
        scaler = self.world.accelerator.scaler
        if self.world.kind == "deepspeed":
            scaler = getattr(self._wrapped, "torch_autocast_z0_gradscaler", None)
        return scaler if scaler is not None and scaler.is_enabled() else None

    def _shapes(self) -> dict[str, torch.Size]:
        """Of the whole parameters, ZeRO-3's too."""
        weights = self.network.named_parameters(remove_duplicate=False)
        return {name: getattr(value, "ds_shape", value.shape) for name, value in weights}

    def _check_network_state(self, state: Mapping[str, Tensor]) -> None:
        shapes = {name: value.shape for name, value in self.network.state_dict().items()} | self._shapes()
        for name in sorted(shapes.keys() ^ state.keys()):
            where = "the network but not in the state" if name in shapes else "the state but not in the network"
            raise DataError(f"network state: {name} is in {where}; is it of another network (model.*)?")
        for name, value in state.items():
            if value.shape != shapes[name]:
                raise DataError(
                    f"network state: {name} is {tuple(value.shape)}, the network has {tuple(shapes[name])}; "
                    f"is it of another network or another number of classes?"
                )


def _prepared(network: nn.Module, world: World, settings: EngineSettings) -> nn.Module:
    """What must happen to a network before it is wrapped. Its parameters stay the same objects."""
    if settings.sync_batchnorm and world.device.type != "cuda":
        raise ConfigError("engine.sync_batchnorm: needs GPUs, and none was found; set it to false")
    opened_with = world.accelerator.mixed_precision  # DeepSpeed is told later
    if world.kind != "deepspeed" and opened_with != {"fp32": "no"}.get(settings.precision, settings.precision):
        raise ConfigError(f"engine.precision = {settings.precision}, but the world was opened with {opened_with}")
    if settings.sync_batchnorm and world.size > 1:
        network = with_common_statistics(network)
    network = network.to(world.device)
    if settings.channels_last and world.kind != "deepspeed":
        network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if settings.compile:
        # In place: names stay as they are. Not network.compile(), which does nothing, in silence, to a Sequential.
        network.forward = torch.compile(network.forward)
    return network


def with_common_statistics(network: nn.Module) -> nn.Module:
    """The network with batch norms that take their statistics over all ranks. Its parameters stay the same objects."""
    if any(type(module).__module__.startswith("timm.") for module in network.modules()):
        from ..models.from_timm import with_common_statistics as by_timm

        return by_timm(network)
    return nn.SyncBatchNorm.convert_sync_batchnorm(network)


def _complete_deepspeed_config(
    world: World, settings: EngineSettings, network: nn.Module, accumulate: int, clip: float, batch: int
) -> None:
    """What DeepSpeed wants to know; `open_world` has begun it."""
    weights = sum(parameter.numel() for parameter in network.parameters())
    bucket = min(_LARGEST_BUCKET, weights + weights % 2)  # DeepSpeed wants it even
    world.accelerator.gradient_accumulation_steps = accumulate
    config = {
        "train_micro_batch_size_per_gpu": max(1, batch),
        "train_batch_size": max(1, batch) * accumulate * world.size,
        "gradient_accumulation_steps": accumulate,
        "gradient_clipping": clip if settings.zero else 0.0,
        "zero_optimization": {
            "stage": settings.zero, "reduce_bucket_size": bucket, "allgather_bucket_size": bucket,
        },
        "zero_allow_untested_optimizer": True,  # it has tested its own only
        "steps_per_print": 10**12,
    }  # fmt: skip
    if settings.precision != "fp32":
        # Weights stay float32, as with the other engines; gradients travel in float32 too, hence the empty list.
        dtype = {"bf16": "bfloat16", "fp16": "float16"}[settings.precision]
        config["torch_autocast"] = {"enabled": True, "dtype": dtype, "lower_precision_safe_modules": []}
    held = world.accelerator.state.deepspeed_plugin.deepspeed_config
    held.clear()
    held.update(config)
