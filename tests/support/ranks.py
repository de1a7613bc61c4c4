"""Real ranks for tests: run functions in W processes that communicate through gloo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Scenario = Callable[[dist.ProcessGroup], None]


def run_on_ranks(scenarios: Sequence[Scenario], ranks: int, folder: Path) -> None:
    """Run each scenario on all ranks, one after the other. An exception is raised here again, with its traceback.

    The processes start only once, because importing torch takes seconds.
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
