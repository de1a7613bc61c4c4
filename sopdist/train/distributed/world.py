"""The ranks of a run: which one this is, its device, and communication other than gradients.

Independent of networks and data. Values exchanged here are small and live on the CPU. They use a process group of their
own (gloo, on GPU machines too), so that they never queue behind gradients. A single rank has no such group.

    world = open_world(find_launch_env(os.environ), config.engine)
    stream = world.on_all_ranks(lambda: Stream(...))  # fails on one rank: every rank raises CollectiveError
    total, count = world.sum([loss, samples])         # rank 0 has [3, 1], rank 1 has [4, 2]: both get [7, 3]
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, distributed

from ...cores import usable_core_ids
from ...errors import ConfigError, DataError
from ..settings import EngineSettings
from .accelerator import (
    Kind,
    backend_of,
    build_accelerator,
    destroy_groups,
    reset_accelerator,
    resolve_kind,
    with_index,
)
from .launch_env import LaunchEnv, export_launch_env, find_launch_env

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["CollectiveError", "LaunchEnv", "Pending", "World", "export_launch_env", "find_launch_env", "open_world"]

T = TypeVar("T")
Group = distributed.ProcessGroup


class CollectiveError(Exception):
    """An error on one rank that every rank raises with the same message; rank 0 prints it."""

    exit_code: int | None = None  # of the process; None: that of a wrong config, or of wrong data or files

    def __init__(self, text: str, *, config: bool = False) -> None:
        super().__init__(text)
        self.config = config  # whether the config is wrong, rather than data or files


class Pending:
    """A reduction in progress."""

    def __init__(self, values: Tensor, work: Any = None) -> None:
        self._values, self._work = values, work

    def result(self) -> list[float]:
        """Wait for the reduced values."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return cast("list[float]", self._values.tolist())


class World:
    """All ranks, as seen by one of them. Methods are collective: all ranks call the same ones in the same order."""

    def __init__(self, env: LaunchEnv, kind: Kind, accelerator: Accelerator, timeout: float) -> None:
        self.rank, self.size = env.rank, env.size
        self.local_rank, self.local_size = env.local_rank, env.local_size
        self.launcher = env.launcher
        self.kind, self.accelerator = kind, accelerator
        self.device: torch.device = with_index(accelerator.device)
        self._timeout = timedelta(seconds=timeout)
        self.control: Group | None = None
        if self.size > 1:
            self.control = distributed.new_group(backend="gloo", timeout=self._timeout)
        self._closed = False

    def on_all_ranks(self, function: Callable[[], T]) -> T:
        """Call `function` on every rank. If it fails on any, all raise CollectiveError with the message of the lowest.

        The message names the rank unless it is rank 0, whose errors usually concern all ranks. An error that is not
        about config, data or files is a bug: the failing rank raises it unchanged.
        """
        value: T | None = None
        error: Exception | None = None
        try:
            value = function()
        except Exception as caught:
            error = caught
        expected = isinstance(error, ConfigError | DataError | OSError | CollectiveError)
        message = None if error is None else str(error) if expected else f"{type(error).__name__}: {error}"
        gathered = self.gather_objects([message, isinstance(error, ConfigError) or getattr(error, "config", False)])
        if error is not None and not expected:
            raise error
        failed = [rank for rank, (text, _) in enumerate(gathered) if text is not None]
        if failed:
            text, config = gathered[failed[0]]
            raise CollectiveError(text if failed[0] == 0 else f"rank {failed[0]}: {text}", config=config) from error
        return cast(T, value)

    def on_rank0(self, function: Callable[[], T]) -> T:
        """Call `function` on rank 0 only and return its value, a small JSON value, on every rank.

        Fails like `on_all_ranks`.
        """
        value = self.on_all_ranks(lambda: function() if self.rank == 0 else None)
        return cast(T, self.gather_objects(value if self.rank == 0 else None)[0])

    def gather_objects(self, value: Any) -> list[Any]:
        """Gather a small JSON value of each rank, in the order of ranks."""
        text = json.dumps(value)
        if self.size == 1:
            return [json.loads(text)]
        # As byte tensors: torch's all_gather_object unpickles what it receives.
        mine = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        distributed.all_gather(sizes, torch.tensor([len(mine)]), group=self.control)
        longest = int(max(sizes))
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(mine)] = mine
        texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        distributed.all_gather(texts, padded, group=self.control)
        return [json.loads(bytes(text[: int(size)].numpy()).decode()) for text, size in zip(texts, sizes, strict=True)]

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sum each value over ranks, in float64."""
        return self.start_sum(values).result()

    def start_sum(self, values: Sequence[float]) -> Pending:
        """Start the same sum in the background; `Pending.result` waits for it."""
        return self._reduce(values, distributed.ReduceOp.SUM)

    def max(self, values: Sequence[float]) -> list[float]:
        """Maximum of each value over ranks."""
        return self._reduce(values, distributed.ReduceOp.MAX).result()

    def barrier(self) -> None:
        """Wait until all ranks have called it."""
        if self.control is not None:
            distributed.barrier(group=self.control)

    def new_group(self, *, for_cpu: bool = False) -> Group | None:
        """Create a process group over all ranks for tensors on the device; None if there is only one rank.

        `for_cpu`: for CPU tensors and background work, with a timeout that allows for slow disks.
        """
        if self.size == 1 and not (for_cpu and distributed.is_initialized()):  # DeepSpeed has a group of one rank
            return None
        if for_cpu:
            return distributed.new_group(backend="gloo", timeout=max(self._timeout, timedelta(days=1)))
        return distributed.new_group(backend=backend_of(self.device.type), timeout=self._timeout)

    def close(self) -> None:
        """Shut down together with the other ranks. A rank that fails alone must not call it, but exit.

        A process that exits while others still communicate may abort, and so may one that keeps its process group.
        """
        if self._closed:
            return
        self._closed = True
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.barrier()
        if distributed.is_initialized():
            destroy_groups(self.kind)
        self.control = None
        reset_accelerator()

    def _reduce(self, values: Sequence[float], operation: Any) -> Pending:
        reduced = torch.tensor(values, dtype=torch.float64)
        if self.control is None:
            return Pending(reduced)
        return Pending(reduced, distributed.all_reduce(reduced, op=operation, group=self.control, async_op=True))


def open_world(env: LaunchEnv, settings: EngineSettings) -> World:
    """Connect to the other ranks. Waits for all of them, at most `engine.timeout` seconds."""
    kind = resolve_kind(settings, env.size)
    world = World(env, kind, build_accelerator(kind, settings, env), settings.timeout)
    torch.set_num_threads(settings.threads or _fair_threads(world))
    return world


def _fair_threads(world: World) -> int:
    """The number of cores that this rank may use, divided by the number of ranks that share them."""
    cores = usable_core_ids()
    mine = [socket.gethostname(), cores]
    return max(1, len(cores) // world.gather_objects(mine).count(mine))
