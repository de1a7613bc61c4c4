"""Ranks for a bench: one function in several processes that can talk to each other, and what it returned in each.

Knows how to start, watch and end them; nothing of what they measure.
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

from ..config import ConfigError
from ..train.place import Place, free_port
from ..train.settings import EngineSettings
from ..train.world import World, open_world

Settings = TypeVar("Settings")
Work = Callable[[World, Settings], Any]  # a function of a module, so that another process finds it

_REFUSED = "refused.txt"  # why a rank could not do what it was asked for, in words for a person
_PATIENCE = 120.0  # seconds that a rank waits for another one before it gives up


class RankError(Exception):
    """A rank failed, or the ranks did not come to an end. The message is for a person."""


def run_on_ranks(work: Work[Settings], settings: Settings, ranks: int, *, timeout: float) -> list[Any]:
    """What `work` returns on each rank, in their order; JSON must be able to say it. No process outlives this call.

    Each rank has a GPU of its own, or, if there are not that many, its share of the CPU's cores.
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
    end = time.monotonic() + timeout
    while not running.join(timeout=max(0.0, end - time.monotonic()), grace_period=2.0):
        if time.monotonic() >= end:
            raise RankError(
                f"the ranks did not come to an end within {timeout:.0f} s and were stopped; nothing was measured. "
                "Is the machine very busy? --quick measures less"
            )


def _run(rank: int, ranks: int, port: int, work: Work[Settings], settings: Settings, folder: Path) -> None:
    """One rank, in a process of its own."""
    if torch.cuda.device_count() < ranks:
        os.environ["ACCELERATE_USE_CPU"] = "1"
    try:
        place = Place(rank, ranks, rank, ranks, "bench", port=port)
        world = open_world(place, EngineSettings(timeout=_PATIENCE))
        result = work(world, settings)
    except ConfigError as error:  # the same on every rank
        (folder / _REFUSED).write_text(str(error))
        sys.exit(1)
    _result(folder, rank).write_text(json.dumps(result))
    world.close()


def _result(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"
