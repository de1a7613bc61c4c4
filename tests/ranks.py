"""Real ranks for tests: functions that run in W processes which can talk to each other through gloo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Scenario = Callable[[dist.ProcessGroup], None]


def run_on_ranks(scenarios: Sequence[Scenario], ranks: int, folder: Path) -> None:
    """Run each scenario on all ranks, one after the other; what one raises is raised here, with its traceback.

    One start for all of them, because a process takes seconds to import torch.
    """
    mp.spawn(_run, args=(ranks, folder, scenarios), nprocs=ranks)


def _run(rank: int, ranks: int, folder: Path, scenarios: Sequence[Scenario]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=ranks)
    for scenario in scenarios:
        group = dist.new_group()
        assert group is not None
        scenario(group)
    dist.barrier()
    dist.destroy_process_group()
