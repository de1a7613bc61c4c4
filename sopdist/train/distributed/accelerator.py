"""Builds accelerate's Accelerator for a kind of engine on the available device, and checks what was built.

This module alone chooses devices and backends. accelerate silently falls back to something else if it is called in the
wrong way, and reads the variables of `accelerate launch`; here only the config counts.
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

from ...errors import ConfigError
from ..settings import EngineSettings
from .launch_env import LAUNCH_VARIABLES, LaunchEnv, export_launch_env

if TYPE_CHECKING:
    from accelerate import Accelerator

Kind = Literal["single", "ddp", "deepspeed"]

_logger = logging.getLogger("sopdist.train")


def resolve_kind(settings: EngineSettings, size: int) -> Kind:
    """The kind of engine for `size` ranks. With one rank ddp becomes single."""
    if settings.kind == "single" and size > 1:
        raise ConfigError(f"engine.kind = single, but {size} ranks were started: start one, or set engine.kind = auto")
    if settings.kind == "deepspeed":
        return "deepspeed"
    return "single" if size == 1 else "ddp"


def device_type() -> Literal["cuda", "cpu"]:
    """cuda if there is a GPU; hide GPUs with CUDA_VISIBLE_DEVICES= or `accelerate launch --cpu`."""
    forced = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    return "cuda" if torch.cuda.is_available() and not forced else "cpu"


def check_precision(settings: EngineSettings, device: str) -> None:
    """Raise ConfigError if the device does not support the precision."""
    if settings.precision == "fp16" and device != "cuda":
        raise ConfigError("engine.precision = fp16: needs a GPU, and none was found; use bf16 or fp32")
    if settings.precision == "bf16" and device == "cuda" and not torch.cuda.is_bf16_supported():
        raise ConfigError("engine.precision = bf16: this GPU does not support bf16; use fp16 or fp32")


def backend_of(device: str) -> str:
    """The process group backend of a device type."""
    return "nccl" if device == "cuda" else "gloo"


def gpu_index(local_rank: int, local_size: int, visible: int) -> int:
    """Index of a rank's GPU among the visible ones: all GPUs of the node, or only its own."""
    if visible == 1:
        return 0
    if visible < local_size:
        raise ConfigError(
            f"{local_size} ranks were started on this node, but it has only {visible} GPUs: start at most {visible} "
            f"ranks per node, or give each rank one visible GPU (CUDA_VISIBLE_DEVICES)"
        )
    return local_rank


def with_index(device: torch.device) -> torch.device:
    """The device with its index, as tensors report it: for a single process accelerate gives just `cuda`."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def build_accelerator(kind: Kind, settings: EngineSettings, env: LaunchEnv) -> Accelerator:
    """Build the Accelerator and, unless the kind is single, the process group over all ranks."""
    device = device_type()
    check_precision(settings, device)
    _drop_launch_settings(settings)
    try:
        from accelerate import Accelerator
        from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs
    except ImportError as error:
        raise ConfigError(f"training needs accelerate: {error}; pip install 'sopdist[train]'") from None
    precision = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}[settings.precision]
    if kind == "single":
        # A launcher of one process also sets its variables, and accelerate would open a process group for them.
        with _environment(dict.fromkeys(LAUNCH_VARIABLES)):
            accelerator = Accelerator(cpu=device == "cpu", mixed_precision=precision)
        _check(accelerator, kind, device, env)
        return accelerator
    if device == "cuda":
        env = replace(env, local_rank=gpu_index(env.local_rank, env.local_size, torch.cuda.device_count()))
    plugin = _deepspeed_plugin(settings, device) if kind == "deepspeed" else None
    export_launch_env(env, os.environ)
    timeout = timedelta(seconds=settings.timeout)
    group = InitProcessGroupKwargs(backend=backend_of(device), timeout=timeout)
    # If this is not set, accelerate guesses a number of threads, and fails where it cannot count cores.
    with _environment({"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}):
        if kind == "deepspeed":
            # Not cpu=True, even on the CPU: accelerate would drop DeepSpeed.
            accelerator = Accelerator(mixed_precision="no", deepspeed_plugin=plugin, kwargs_handlers=[group])
        else:
            # Each rank keeps its own batch statistics during training; the engine averages them when needed.
            ddp = DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)
            accelerator = Accelerator(cpu=device == "cpu", mixed_precision=precision, kwargs_handlers=[group, ddp])
    _check(accelerator, kind, device, env)
    return accelerator


def destroy_groups(kind: Kind) -> None:
    """Destroy all process groups. DeepSpeed keeps track of them: without its own call it cannot initialise again."""
    if kind == "deepspeed":
        from deepspeed import comm

        comm.destroy_process_group()
    else:
        distributed.destroy_process_group()


def reset_accelerator() -> None:
    """Reset accelerate's global state, so that this process can build another Accelerator."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)


def _deepspeed_plugin(settings: EngineSettings, device: str) -> Any:
    if device == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read on import
    # With it, CPU ranks create shared-memory files for an inference all-reduce, and never remove them.
    os.environ.pop("LOCAL_SIZE", None)
    if "SOPDIST_VERBOSE" not in os.environ:
        logging.getLogger("DeepSpeed").addFilter(_is_relevant)
        # It calls collectives by names that newer torch deprecates.
        warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    try:
        import deepspeed.ops
        import transformers  # noqa: F401  accelerate's plugin needs it
        from accelerate.utils import DeepSpeedPlugin
    except ImportError as error:
        raise ConfigError(
            f"engine.kind = deepspeed: {error}; install torch first, then: pip install --no-build-isolation "
            f"'sopdist[train]'; or use engine.kind = ddp"
        ) from None
    # That all-reduce is an operator whose first use compiles for a minute. Training never calls it.
    deepspeed.ops.__compatible_ops__ = {**deepspeed.ops.__compatible_ops__, "deepspeed_shm_comm": False}
    # A placeholder: DeepSpeedEngine replaces it when it knows the network.
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": settings.zero}}
    return DeepSpeedPlugin(hf_ds_config=config, zero3_init_flag=False)


def _is_relevant(record: logging.LogRecord) -> bool:
    """Hide DeepSpeed's startup messages: pass warnings only, except the one about untested optimizers."""
    return record.levelno >= logging.WARNING and "untested optimizer" not in record.getMessage()


def _drop_launch_settings(settings: EngineSettings) -> None:
    """Remove the settings of `accelerate launch` from the environment; warn if they contradict the config."""
    asked = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if asked not in ("no", settings.precision):
        _logger.warning("accelerate launch asks for %s; engine.precision = %s is used", asked, settings.precision)
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]


def _check(accelerator: Accelerator, kind: Kind, device: str, env: LaunchEnv) -> None:
    types = {"single": "NO", "ddp": "MULTI_GPU" if device == "cuda" else "MULTI_CPU", "deepspeed": "DEEPSPEED"}
    wanted = (types[kind], env.size, env.rank, device, None if kind == "single" else backend_of(device))
    backend = distributed.get_backend() if distributed.is_initialized() else None
    found = (
        str(cast(Any, accelerator.distributed_type).value),
        accelerator.num_processes,
        accelerator.process_index,
        accelerator.device.type,
        backend,
    )
    if found != wanted:
        fields = ("type", "ranks", "rank", "device", "backend")
        wrong = ", ".join(
            f"{name} {got} instead of {want}"
            for name, got, want in zip(fields, found, wanted, strict=True)
            if got != want
        )
        raise ConfigError(
            f"engine.kind = {kind}: accelerate created a different setup: {wrong}; started by {env.launcher}"
        )


@contextmanager
def _environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Change environment variables inside the block; None unsets one."""
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
