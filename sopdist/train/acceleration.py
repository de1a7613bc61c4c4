"""Builds accelerate's Accelerator for a kind of engine on the device at hand, and proves that it is what was asked.

The only place that decides about devices and backends. accelerate falls back in silence to something else if it is
called in the wrong way, and takes settings from variables of `accelerate launch`: the config alone decides here.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import distributed

from ..config import ConfigError
from .place import LAUNCH_VARIABLES, Place, export_place
from .settings import EngineSettings

if TYPE_CHECKING:
    from accelerate import Accelerator

Kind = Literal["single", "ddp", "deepspeed"]

_logger = logging.getLogger("sopdist.train")


def resolve_kind(settings: EngineSettings, size: int) -> Kind:
    """The kind of engine for so many ranks. One rank has nobody to average with: ddp is single then."""
    if settings.kind == "single" and size > 1:
        raise ConfigError(f"engine.kind = single, but {size} ranks were started: start one, or set engine.kind = auto")
    if settings.kind == "deepspeed":
        return "deepspeed"
    return "single" if size == 1 else "ddp"


def device_type() -> Literal["cuda", "cpu"]:
    """GPUs if there are any; hide them with CUDA_VISIBLE_DEVICES= or `accelerate launch --cpu`."""
    forced = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    return "cuda" if torch.cuda.is_available() and not forced else "cpu"


def check_precision(settings: EngineSettings, device: str) -> None:
    """Refuse an arithmetic that the device does not have."""
    if settings.precision == "fp16" and device != "cuda":
        raise ConfigError("engine.precision = fp16: needs a GPU, and none was found; use bf16 or fp32")
    if settings.precision == "bf16" and device == "cuda" and not torch.cuda.is_bf16_supported():
        raise ConfigError("engine.precision = bf16: this GPU has no bf16; use fp16 or fp32")


def backend_of(device: str) -> str:
    """The communication library of a device."""
    return "nccl" if device == "cuda" else "gloo"


def gpu_of(local_rank: int, local_size: int, visible: int) -> int:
    """The GPU of a rank, among those that it sees: all of its node, or only its own."""
    if visible == 1:
        return 0
    if visible < local_size:
        raise ConfigError(
            f"{local_size} ranks were started on this node, but it has only {visible} GPUs: start at most {visible} "
            f"ranks on a node, or let each rank see one GPU of its own (CUDA_VISIBLE_DEVICES)"
        )
    return local_rank


def numbered(device: torch.device) -> torch.device:
    """The device with its number, as tensors name it: accelerate calls the GPU of a single process just cuda."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def build_accelerator(kind: Kind, settings: EngineSettings, place: Place) -> Accelerator:
    """An Accelerator with a process group over all ranks, if the kind has one."""
    device = device_type()
    check_precision(settings, device)
    _take_over_launch_settings(settings)
    try:
        from accelerate import Accelerator
        from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs
    except ImportError as error:
        raise ConfigError(f"training needs accelerate: {error}; pip install 'sopdist[train]'") from None
    precision = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}[settings.precision]
    if kind == "single":
        # A launcher of one process leaves its variables too, and accelerate would open a process group for them.
        with _environment(dict.fromkeys(LAUNCH_VARIABLES)):
            accelerator = Accelerator(cpu=device == "cpu", mixed_precision=precision)
        _check(accelerator, kind, device, place)
        return accelerator
    if device == "cuda":
        place = replace(place, local_rank=gpu_of(place.local_rank, place.local_size, torch.cuda.device_count()))
    plugin = _deepspeed_plugin(settings, device) if kind == "deepspeed" else None
    export_place(place, os.environ)
    timeout = timedelta(seconds=settings.timeout)
    group = InitProcessGroupKwargs(backend=backend_of(device), timeout=timeout)
    # accelerate guesses a number of threads if this is not set, and fails where it cannot count cores.
    with _environment({"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}):
        if kind == "deepspeed":
            # Not cpu=True, even on the CPU: that drops DeepSpeed.
            accelerator = Accelerator(mixed_precision="no", deepspeed_plugin=plugin, kwargs_handlers=[group])
        else:
            # Each rank keeps its own batch statistics while training; they are averaged when they are needed.
            ddp = DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)
            accelerator = Accelerator(cpu=device == "cpu", mixed_precision=precision, kwargs_handlers=[group, ddp])
    _check(accelerator, kind, device, place)
    return accelerator


def end_groups(kind: Kind) -> None:
    """Take leave of all process groups. DeepSpeed remembers them, and must be told, or it cannot begin again."""
    if kind == "deepspeed":
        from deepspeed import comm

        comm.destroy_process_group()
    else:
        distributed.destroy_process_group()


def forget_accelerator() -> None:
    """Let another Accelerator be built in this process."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)


def _deepspeed_plugin(settings: EngineSettings, device: str) -> Any:
    if device == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when it is imported
    # With it, CPU ranks make shared-memory files for an all-reduce of inference, which nobody removes.
    os.environ.pop("LOCAL_SIZE", None)
    if "SOPDIST_VERBOSE" not in os.environ:
        logging.getLogger("DeepSpeed").addFilter(_is_news)
        # It calls collectives by names that newer torch would like to be different ones.
        warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    try:
        import deepspeed.ops
        import transformers  # noqa: F401  accelerate's plugin is built upon it
        from accelerate.utils import DeepSpeedPlugin
    except ImportError as error:
        raise ConfigError(
            f"engine.kind = deepspeed: {error}; install torch first, then: pip install --no-build-isolation "
            f"'sopdist[train]'; or use engine.kind = ddp"
        ) from None
    # The same all-reduce is an operator that is compiled for a minute when it is first met. Training never calls it.
    deepspeed.ops.__compatible_ops__ = {**deepspeed.ops.__compatible_ops__, "deepspeed_shm_comm": False}
    # The engine completes this config when it knows the network.
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": settings.zero}}
    return DeepSpeedPlugin(hf_ds_config=config, zero3_init_flag=False)


def _is_news(record: logging.LogRecord) -> bool:
    """DeepSpeed tells much at every start; only warnings are let through, except that it knows other optimizers."""
    return record.levelno >= logging.WARNING and "untested optimizer" not in record.getMessage()


def _take_over_launch_settings(settings: EngineSettings) -> None:
    """Settings of `accelerate launch` have no say here; warn if they say something else."""
    asked = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if asked not in ("no", settings.precision):
        _logger.warning("accelerate launch asks for %s; engine.precision = %s is used", asked, settings.precision)
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]


def _check(accelerator: Accelerator, kind: Kind, device: str, place: Place) -> None:
    types = {"single": "NO", "ddp": "MULTI_GPU" if device == "cuda" else "MULTI_CPU", "deepspeed": "DEEPSPEED"}
    wanted = (types[kind], place.size, place.rank, device, None if kind == "single" else backend_of(device))
    backend = distributed.get_backend() if distributed.is_initialized() else None
    found = (
        str(cast(Any, accelerator.distributed_type).value),
        accelerator.num_processes,
        accelerator.process_index,
        accelerator.device.type,
        backend,
    )
    if found != wanted:
        what = ("type", "ranks", "rank", "device", "backend")
        wrong = ", ".join(
            f"{name} {got} instead of {want}"
            for name, got, want in zip(what, found, wanted, strict=True)
            if got != want
        )
        raise ConfigError(
            f"engine.kind = {kind}: accelerate set up something else: {wrong}; started by {place.launcher}"
        )


@contextmanager
def _environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Change variables of the environment for a moment; None hides one."""
    before = {name: os.environ.get(name) for name in changes}
    try:
        _set_environment(changes)
        yield
    finally:
        _set_environment(before)


def _set_environment(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
