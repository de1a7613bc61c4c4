"""The ranks of a run: which one this is, what device it has, and how ranks agree on things that are not gradients.

Knows no network and no data. What ranks tell each other here are small host-side values, over a process group of its
own (gloo, on GPU machines too), so that they never queue behind gradients. One rank needs no group at all.

    world = open_world(find_place(os.environ), config.engine)
    stream = world.agree(lambda: Stream(...))      # fails on one rank: TogetherError on all, none waits for another
    total, count = world.sum([loss, samples])      # rank 0 has [3, 1], rank 1 has [4, 2]: both get [7, 3]
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, distributed

from ..config import ConfigError
from ..data.errors import DataError
from .acceleration import Kind, backend_of, build_accelerator, end_groups, forget_accelerator, numbered, resolve_kind
from .place import Place, export_place, find_place
from .settings import EngineSettings

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["Pending", "Place", "TogetherError", "World", "export_place", "find_place", "open_world"]

T = TypeVar("T")
Group = distributed.ProcessGroup


class TogetherError(Exception):
    """Something went wrong on a rank, and all ranks know: each raises this, and rank 0 may print it for all."""

    def __init__(self, text: str, *, config: bool = False) -> None:
        super().__init__(text)
        self.config = config  # whether the config is at fault, rather than data or files


class Pending:
    """A sum on its way."""

    def __init__(self, values: Tensor, work: Any = None) -> None:
        self._values, self._work = values, work

    def result(self) -> list[float]:
        """The sums, when they are there."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return cast("list[float]", self._values.tolist())


class World:
    """All ranks, seen from one. Every method is collective: all ranks call the same ones in the same order."""

    def __init__(self, place: Place, kind: Kind, accelerator: Accelerator, timeout: float) -> None:
        self.rank, self.size = place.rank, place.size
        self.local_rank, self.local_size = place.local_rank, place.local_size
        self.launcher = place.launcher
        self.kind, self.accelerator = kind, accelerator
        self.device: torch.device = numbered(accelerator.device)
        self._timeout = timedelta(seconds=timeout)
        self.control: Group | None = None
        if self.size > 1:
            self.control = distributed.new_group(backend="gloo", timeout=self._timeout)
        self._closed = False

    def agree(self, what: Callable[[], T]) -> T:
        """Do it on every rank. If it fails on any, all raise TogetherError with the message of the lowest one.

        The message says which rank it was unless it was rank 0, whose troubles are everybody's. An error that is not
        about config, data or files is a bug: the rank that has it raises it as it is.
        """
        value: T | None = None
        error: Exception | None = None
        try:
            value = what()
        except Exception as caught:
            error = caught
        expected = isinstance(error, ConfigError | DataError | OSError | TogetherError)
        mine = None if error is None else str(error) if expected else f"{type(error).__name__}: {error}"
        told = self.gather_objects([mine, isinstance(error, ConfigError) or getattr(error, "config", False)])
        if error is not None and not expected:
            raise error
        failed = [rank for rank, (text, _) in enumerate(told) if text is not None]
        if failed:
            text, config = told[failed[0]]
            raise TogetherError(text if failed[0] == 0 else f"rank {failed[0]}: {text}", config=config) from error
        return cast(T, value)

    def on_first(self, what: Callable[[], T]) -> T:
        """Do it on rank 0 only, and give its value, which JSON must be able to say, to all; fails as `agree` does."""
        value = self.agree(lambda: what() if self.rank == 0 else None)
        return cast(T, self.gather_objects(value if self.rank == 0 else None)[0])

    def gather_objects(self, value: Any) -> list[Any]:
        """A small value of each rank, which JSON must be able to say, in the order of ranks."""
        text = json.dumps(value)
        if self.size == 1:
            return [json.loads(text)]
        # Tensors of bytes: what torch has for objects unpickles what it receives.
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
        """The sums over ranks, in float64."""
        return self.begin_sum(values).result()

    def begin_sum(self, values: Sequence[float]) -> Pending:
        """The same in the background: go on computing, and ask for the result later."""
        return self._reduce(values, distributed.ReduceOp.SUM)

    def max(self, values: Sequence[float]) -> list[float]:
        """The largest over ranks of each value."""
        return self._reduce(values, distributed.ReduceOp.MAX).result()

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        if self.control is not None:
            distributed.barrier(group=self.control)

    def new_group(self, *, of_hosts: bool = False) -> Group | None:
        """Another process group over all ranks, for tensors of the device; None if one rank can do without.

        `of_hosts`: for tensors of the host, and for work in the background that may take its time on a slow disk.
        """
        if self.size == 1 and not (of_hosts and distributed.is_initialized()):  # DeepSpeed has one of one rank
            return None
        if of_hosts:
            return distributed.new_group(backend="gloo", timeout=max(self._timeout, timedelta(days=1)))
        return distributed.new_group(backend=backend_of(self.device.type), timeout=self._timeout)

    def close(self) -> None:
        """Part from the others, together. Not for a rank that fails alone: it must just end.

        A rank that ends while others still talk may abort, and so may one that leaves its process group behind.
        """
        if self._closed:
            return
        self._closed = True
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.barrier()
        if distributed.is_initialized():
            end_groups(self.kind)
        self.control = None
        forget_accelerator()

    def _reduce(self, values: Sequence[float], how: Any) -> Pending:
        reduced = torch.tensor(values, dtype=torch.float64)
        if self.control is None:
            return Pending(reduced)
        return Pending(reduced, distributed.all_reduce(reduced, op=how, group=self.control, async_op=True))


def open_world(place: Place, settings: EngineSettings) -> World:
    """Meet the other ranks. Waits for all of them, `engine.timeout` seconds at most."""
    kind = resolve_kind(settings, place.size)
    world = World(place, kind, build_accelerator(kind, settings, place), settings.timeout)
    torch.set_num_threads(settings.threads or _fair_threads(world))
    return world


def _fair_threads(world: World) -> int:
    """The cores that this rank may use, divided by the ranks that were given the same ones."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    mine = [socket.gethostname(), cores]
    return max(1, len(cores) // world.gather_objects(mine).count(mine))
