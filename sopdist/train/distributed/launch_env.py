"""The launch environment: which rank of how many this process is, read from the variables that its launcher set.

Independent of torch, process groups and devices.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from ...errors import ConfigError

_LOCALHOST = "127.0.0.1"
_FIRST_PORT, _PORTS = 12000, 20000  # below the range of ephemeral ports
_NOT_A_STEP = 0xFFFFFFF0  # step ids from about here are the batch script and the interactive shell

# Rank, size, local rank, local size, as the two families of mpirun call them.
_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
LAUNCH_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", *_MPI[0], *_MPI[1], "MV2_COMM_WORLD_SIZE",
)  # fmt: skip


@dataclass(frozen=True)
class LaunchEnv:
    """This process among all ranks."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # among the ranks of this node
    local_size: int = 1
    launcher: str = "python"
    master: str = _LOCALHOST  # host of rank 0
    port: int = 0  # of rank 0; 0: not fixed, which is enough for one process


def find_launch_env(environ: Mapping[str, str]) -> LaunchEnv:
    """Read the variables of the launcher. Without one, or in a batch script without `srun`: a single process."""
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return _from_ranks(environ)
    step = _slurm_step(environ)
    if step is not None:
        return _from_slurm(environ, step)
    for names in _MPI:
        if all(name in environ for name in names) and _integer(environ, names[1]) > 1:
            return _checked(environ, names, launcher="mpirun", port=_integer(environ, "MASTER_PORT", 29500))
    return LaunchEnv()


def export_launch_env(env: LaunchEnv, environ: MutableMapping[str, str]) -> None:
    """Set the variables that torch, accelerate and DeepSpeed read."""
    environ["RANK"], environ["WORLD_SIZE"] = str(env.rank), str(env.size)
    environ["LOCAL_RANK"], environ["LOCAL_WORLD_SIZE"] = str(env.local_rank), str(env.local_size)
    environ["MASTER_ADDR"] = env.master
    environ["MASTER_PORT"] = str(env.port or free_port())


def first_host(hosts: str) -> str:
    """The first host of a list as Slurm writes it: `node003` for `node[003-007,9],other`."""
    first = re.split(r",(?![^\[]*\])", hosts)[0]  # at commas outside brackets
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first)


def tasks_per_node(text: str) -> list[int]:
    """The number of ranks on each node, from a list as Slurm writes it: `2(x3),1` is 2, 2, 2, 1."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ConfigError(f"SLURM_STEP_TASKS_PER_NODE = {text!r}: must have the form 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _from_ranks(environ: Mapping[str, str]) -> LaunchEnv:
    """torchrun, deepspeed and accelerate launch; also variables that were set manually."""
    for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if other not in environ:
            raise ConfigError(f"{name} is set but {other} is not: set both, or start with torchrun, deepspeed or srun")
    size = _integer(environ, "WORLD_SIZE")
    step = _slurm_step(environ)
    if step is not None and size < step:
        raise ConfigError(
            f"WORLD_SIZE = {size}, but srun started {step} tasks (SLURM_STEP_NUM_TASKS): each would train alone; "
            f"unset RANK and WORLD_SIZE, or start one task per node with torchrun in it"
        )
    if size > 1:
        for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            if name not in environ:
                raise ConfigError(f"WORLD_SIZE = {size}, but {name} is not set: start with torchrun, deepspeed or srun")
    local_size = next((name for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE") if name in environ), "WORLD_SIZE")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", local_size)
    if "TORCHELASTIC_RUN_ID" in environ:
        launcher = "accelerate" if "ACCELERATE_MIXED_PRECISION" in environ else "torchrun"
    else:
        launcher = "deepspeed" if "CROSS_SIZE" in environ else "environment"
    return _checked(environ, names, launcher=launcher, port=_integer(environ, "MASTER_PORT", 0))


def _slurm_step(environ: Mapping[str, str]) -> int | None:
    """Number of tasks of the srun step that this process belongs to; None outside a step.

    A batch script has SLURM_PROCID and SLURM_NTASKS as well, but is one process: only the variables of a step count.
    """
    if "SLURM_PROCID" not in environ or "SLURM_STEP_NUM_TASKS" not in environ:
        return None
    if _integer(environ, "SLURM_STEP_ID", _integer(environ, "SLURM_STEPID", 0)) >= _NOT_A_STEP:
        return None
    return _integer(environ, "SLURM_STEP_NUM_TASKS")


def _from_slurm(environ: Mapping[str, str], size: int) -> LaunchEnv:
    rank, local_rank = _integer(environ, "SLURM_PROCID"), _integer(environ, "SLURM_LOCALID", 0)
    if rank >= size:
        raise ConfigError(f"SLURM_PROCID = {rank}, but SLURM_STEP_NUM_TASKS = {size}: they belong to different steps")
    per_node = tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", str(size)))
    node = _integer(environ, "SLURM_NODEID", 0)
    if sum(per_node) != size or node >= len(per_node) or local_rank >= per_node[node]:
        raise ConfigError(
            f"SLURM_STEP_TASKS_PER_NODE = {environ.get('SLURM_STEP_TASKS_PER_NODE')!r} contradicts SLURM_NODEID = "
            f"{node}, SLURM_LOCALID = {local_rank}, SLURM_STEP_NUM_TASKS = {size}: they belong to different steps"
        )
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    if len(per_node) > 1 and not hosts and "MASTER_ADDR" not in environ:
        raise ConfigError("SLURM_STEP_NODELIST is not set: set MASTER_ADDR to the host of the first task")
    master = _LOCALHOST if len(per_node) == 1 else first_host(hosts)
    # Jobs that share a node, and steps that share a job, must not use the same port.
    job, step = _integer(environ, "SLURM_JOB_ID", 0), _integer(environ, "SLURM_STEP_ID", 0)
    return LaunchEnv(
        rank, size, local_rank, per_node[node], "srun",
        master=environ.get("MASTER_ADDR") or master,
        port=_integer(environ, "MASTER_PORT", _FIRST_PORT + (7 * job + step) % _PORTS),
    )  # fmt: skip


def _checked(environ: Mapping[str, str], names: tuple[str, str, str, str], *, launcher: str, port: int) -> LaunchEnv:
    """A LaunchEnv from four variables: rank, size, local rank, local size; each rank must be less than its size."""
    rank, size = _integer(environ, names[0]), _integer(environ, names[1])
    local_rank, local_size = _integer(environ, names[2], 0), _integer(environ, names[3])
    for small, large, limit in ((rank, size, names[1]), (local_rank, local_size, names[3])):
        if small >= large:
            name = names[0] if limit == names[1] else names[2]
            raise ConfigError(f"{name} = {small}, but {limit} = {large}: they belong to different launches")
    if local_size > size:
        raise ConfigError(f"{names[3]} = {local_size}, but {names[1]} = {size}: they belong to different launches")
    return LaunchEnv(rank, size, local_rank, local_size, launcher, environ.get("MASTER_ADDR") or _LOCALHOST, port)


def _integer(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name, "") if default is None else environ.get(name) or str(default)
    if not text.strip().isdigit():
        raise ConfigError(f"{name} = {text!r} in the environment: must be an integer")
    return int(text)


def free_port() -> int:
    """A port of this host that is currently unused."""
    with socket.socket() as probe:
        probe.bind((_LOCALHOST, 0))
        port: int = probe.getsockname()[1]
    return port
