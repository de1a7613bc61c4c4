"""Probes of the machine: cores, limits, disks, shared memory, Slurm. They ask the system and import no package."""

from __future__ import annotations

import os
import re
import resource
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ..cli.units import format_bytes
from ..cores import usable_cores
from .finding import Finding

SHARED_MEMORY = Path("/dev/shm")
_PROC = Path("/proc")
_DEEPSPEED_BUFFER = re.compile(r"deepspeed_allreduce_buffer_(\d+)_.+_\d+_\d+")  # user, address, port, rank
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_MIN_DISK, _MIN_SHARED_MEMORY, _MIN_OPEN_FILES = 1 << 30, 1 << 28, 1024


def probe_cores() -> list[Finding]:
    """The cores that this process may use, and the thread limits in its environment."""
    cores = usable_cores()
    detail = f"{cores} of {os.cpu_count() or 1}"
    if (quota := _cpu_quota()) is not None:
        detail += f", CPU time limited to {quota:.3g} cores"
    threads = {name: os.environ[name] for name in _THREAD_VARIABLES if name in os.environ}
    detail += "".join(f", {name}={value}" for name, value in threads.items())
    if any(not value.isdigit() or int(value) > cores for value in threads.values()):
        return [Finding("CPU cores", "note", detail, "unset it: each rank would start more threads than it has cores")]
    if quota is not None and quota < cores / 2:
        return [Finding("CPU cores", "note", detail, f"set engine.threads and data.threads to at most {quota:.0f}")]
    return [Finding("CPU cores", "ok", detail)]


def _cpu_quota() -> float | None:
    """The container's limit on CPU time, in cores."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else max(1.0, int(quota) / int(period))
    except (OSError, ValueError, ZeroDivisionError):
        return None


def probe_open_files() -> list[Finding]:
    """The limit on open files. The data stream keeps its shards open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shown = ["unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}" for limit in (soft, hard)]
    detail = f"{shown[0]} (hard limit {shown[1]})"
    if soft != resource.RLIM_INFINITY and soft < _MIN_OPEN_FILES:
        return [Finding("open files", "note", detail, f"ulimit -n {_MIN_OPEN_FILES} or more: shards are kept open")]
    return [Finding("open files", "ok", detail)]


def probe_disk() -> list[Finding]:
    """Free space in the current folder, where runs are written by default, and the folder for caches."""
    here = Path.cwd()
    free = shutil.disk_usage(here).free
    detail = f"{format_bytes(free)} free in {here}"
    if not _is_writable(here):
        finding = Finding("disk", "note", f"{here} cannot be written", "start in another folder, or set run.folder")
    elif free < _MIN_DISK:
        advice = "free some space, or set run.folder; `sopdist plan` shows how much a run needs"
        finding = Finding("disk", "note", detail, advice)
    else:
        finding = Finding("disk", "ok", detail)
    return [finding, _find_caches()]


def _find_caches() -> Finding:
    """Compiled operators, Triton kernels and shards of remote splits are cached there."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    existing = next(parent for parent in (cache, *cache.parents) if parent.exists())
    if existing.is_dir() and _is_writable(existing):
        return Finding("caches", "ok", str(cache))
    advice = "set HOME or XDG_CACHE_HOME to a writable folder: compiled code is cached there"
    return Finding("caches", "broken", f"{cache} cannot be written", advice)


def _is_writable(folder: Path) -> bool:
    """Try it: permissions do not reveal a read-only mount."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def probe_shared_memory() -> list[Finding]:
    """Free shared memory, and files that dead DeepSpeed runs have left in it."""
    if not SHARED_MEMORY.is_dir():
        advice = "mount a tmpfs there: NCCL and DeepSpeed use it"
        return [Finding("shared memory", "missing", f"no {SHARED_MEMORY}", advice)]
    usage = shutil.disk_usage(SHARED_MEMORY)
    detail = f"{format_bytes(usage.free)} of {format_bytes(usage.total)} free in {SHARED_MEMORY}"
    if stale := list(find_stale_buffers(SHARED_MEMORY)):
        size = format_bytes(sum(path.stat().st_size for path in stale))
        names = " ".join(str(path) for path in stale[:3]) + (" ..." if len(stale) > 3 else "")
        detail += f"; {len(stale)} files, {size}, of finished DeepSpeed runs"
        return [Finding("shared memory", "note", detail, f"remove them: rm {names}")]
    if usage.free < _MIN_SHARED_MEMORY:
        return [Finding("shared memory", "note", detail, "too little for DeepSpeed and NCCL: docker run --shm-size=8g")]
    return [Finding("shared memory", "ok", detail)]


def find_stale_buffers(folder: Path) -> Iterator[Path]:
    """Files of this user's DeepSpeed runs that no process maps any more."""
    own = [
        path for path in sorted(folder.glob("deepspeed_allreduce_buffer_*"))
        if (found := _DEEPSPEED_BUFFER.fullmatch(path.name)) and int(found[1]) == os.getuid()
    ]  # fmt: skip
    mapped = "".join(_read_memory_maps()) if own else ""
    yield from (path for path in own if not re.search(rf"{re.escape(str(path))}$", mapped, re.MULTILINE))


def _read_memory_maps() -> Iterator[str]:
    for maps in _PROC.glob("[0-9]*/maps"):
        try:
            yield maps.read_text(errors="replace")
        except OSError:  # the process has exited, or belongs to another user and does not map this user's files
            continue


def probe_slurm() -> list[Finding]:
    """Whether this is a Slurm job, and whether one can be started."""
    tools = [tool for tool in ("sbatch", "srun") if shutil.which(tool)]
    job = os.environ.get("SLURM_JOB_ID")
    if job is not None:
        tasks, nodes = os.environ.get("SLURM_NTASKS", "?"), os.environ.get("SLURM_JOB_NUM_NODES", "?")
        detail = f"in job {job}: tasks {tasks}, nodes {nodes}"
        if "srun" not in tools:
            return [Finding("Slurm", "broken", f"{detail}; no srun", "add Slurm's commands to PATH to start ranks")]
        return [Finding("Slurm", "ok", detail)]
    if tools:
        return [Finding("Slurm", "ok", f"{' and '.join(tools)} found; not in a job")]
    advice = "nothing to do: torchrun or deepspeed start the ranks on one machine"
    return [Finding("Slurm", "note", "not installed", advice)]
