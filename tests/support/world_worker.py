"""A rank that calls every collective of the world and writes the results to a file.

python -m tests.support.world_worker FOLDER KIND
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from sopdist.errors import ConfigError
from sopdist.train.distributed.world import World, find_launch_env, open_world
from sopdist.train.settings import EngineSettings


def failing(on: set[int], rank: int, kind: type[Exception]) -> Callable[[], str]:
    def function() -> str:
        if rank in on:
            raise kind(f"error of {rank}")
        return "fine"

    return function


def outcome(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def exchange(world: World) -> dict[str, Any]:
    rank = world.rank
    pending = world.start_sum([rank, 0.1])
    group = world.new_group()
    ones = torch.ones(2)
    if group is not None:
        distributed.all_reduce(ones, group=group)
    return {
        "env": [world.rank, world.size, world.local_rank, world.local_size, world.kind, world.device.type],
        "launcher": world.launcher,
        "threads": torch.get_num_threads(),
        "sum": world.sum([1.0, 10.0 * rank]),
        "max": world.max([float(rank), -float(rank)]),
        "pending": pending.result(),
        "objects": world.gather_objects({"rank": rank, "text": "ä" * rank * 100, "none": None}),
        "group": ones.tolist(),
        "all fine": outcome(lambda: world.on_all_ranks(failing(set(), rank, OSError))),
        "last fails": outcome(lambda: world.on_all_ranks(failing({world.size - 1}, rank, ConfigError))),
        "all fail": outcome(lambda: world.on_all_ranks(failing(set(range(world.size)), rank, OSError))),
        "a bug": outcome(lambda: world.on_all_ranks(failing({world.size - 1}, rank, ZeroDivisionError))),
        "on rank 0": outcome(lambda: world.on_rank0(lambda: {"by": rank})),
        "rank 0 fails": outcome(lambda: world.on_rank0(failing({0}, rank, ConfigError))),
        "after": world.sum([1.0])[0],
    }


def main() -> None:
    folder, kind = Path(sys.argv[-2]), sys.argv[-1]
    world = open_world(find_launch_env(os.environ), EngineSettings(kind=kind, timeout=60))
    seen = exchange(world)
    world.close()
    world.close()
    seen["closed"] = not distributed.is_initialized()
    (folder / f"rank{world.rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
