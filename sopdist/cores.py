"""CPU cores available to this process.

A container, `taskset`, Slurm or a launcher may confine a process to some of the machine's cores. `os.cpu_count()` does
not know about that: sizing a thread pool by it would oversubscribe the cores. Imports nothing from the package.
"""

from __future__ import annotations

import os


def usable_core_ids() -> list[int]:
    """IDs of the cores this process may run on, sorted; all cores where the platform has no CPU affinity.

    Ranks on one host that return the same list share these cores.
    """
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def usable_cores() -> int:
    """Number of cores this process may use: the default for options that set a number of threads or workers."""
    return len(usable_core_ids())
