"""Run one function on several ranks and collect its results.

Starts, watches and stops the processes. Independent of what they measure.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.multiprocessing as mp

from ..errors import ConfigError, UserError
from ..train.distributed.launch_env import LaunchEnv, free_port
from ..train.distributed.world import World, open_world
from ..train.settings import EngineSettings

Settings = TypeVar("Settings")
Work = Callable[[World, Settings], Any]  # a module-level function, so that another process can import it

_REFUSED = "refused.txt"  # the message of a ConfigError, which is the same on every rank
_PATIENCE = 120.0  # seconds that a rank waits for another one before it gives up


class RankError(UserError):
    """A rank failed, or the ranks did not finish in time."""


def run_on_ranks(work: Work[Settings], settings: Settings, ranks: int, *, timeout: float) -> list[Any]:
    """Return the results of `work` in rank order; they must be JSON serialisable. No process outlives this call.

    Each rank has its own GPU or, if there are fewer GPUs than ranks, its share of the CPU cores.
    """
    with tempfile.TemporaryDirectory(prefix="sopdist-bench-") as name:
        folder = Path(name)
        running = mp.spawn(_run, (ranks, free_port(), work, settings, folder), nprocs=ranks, join=False, daemon=True)
        try:
            _wait_for(running, timeout)
        except (mp.ProcessExitedException, mp.ProcessRaisedException) as error:
            if (folder / _REFUSED).exists():
                raise ConfigError((folder / _REFUSED).read_text()) from None
            raise RankError(f"rank {error.error_index} of {ranks} failed, nothing was measured: {error}") from None
        finally:
            for process in running.processes:
                process.kill()
                process.join()
        return [json.loads(_result(folder, rank).read_text()) for rank in range(ranks)]


def _wait_for(running: Any, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while not running.join(timeout=max(0.0, deadline - time.monotonic()), grace_period=2.0):
        if time.monotonic() >= deadline:
            raise RankError(
                f"the ranks did not finish within {timeout:.0f} s and were stopped; nothing was measured. "
                "Is the machine very busy? --quick measures less"
            )


def _run(rank: int, ranks: int, port: int, work: Work[Settings], settings: Settings, folder: Path) -> None:
    """Run one rank, in its own process."""
    if torch.cuda.device_count() < ranks:
        os.environ["ACCELERATE_USE_CPU"] = "1"
    try:
        launch_env = LaunchEnv(rank, ranks, rank, ranks, "bench", port=port)
        world = open_world(launch_env, EngineSettings(timeout=_PATIENCE))
        result = work(world, settings)
    except ConfigError as error:
        (folder / _REFUSED).write_text(str(error))
        sys.exit(1)
    _result(folder, rank).write_text(json.dumps(result))
    world.close()


def _result(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"
