"""Probes of the machine: cores, limits, disks, shared memory, Slurm. They ask the system and import no package."""

from __future__ import annotations

import os
import re
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from .finding import Finding
from .isolation import answer

SHARED = Path("/dev/shm")
_PROCESSES = Path("/proc")
_OURS = re.compile(r"deepspeed_allreduce_buffer_(\d+)_.+_\d+_\d+")  # user, address, port, rank
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_LEAST_DISK, _LEAST_SHARED, _LEAST_FILES = 1 << 30, 1 << 28, 1024
_GIB = 1 << 30


def probe_cores() -> list[Finding]:
    """How many cores this process may use, and what it has been told about threads."""
    mine, all_cores = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    detail = f"{mine} of {all_cores}"
    if (share := _cpu_share()) is not None:
        detail += f", limited to the time of {share:.3g}"
    told = {name: os.environ[name] for name in _THREADS if name in os.environ}
    detail += "".join(f", {name}={value}" for name, value in told.items())
    if any(not value.isdigit() or int(value) > mine for value in told.values()):
        return [Finding("CPU cores", "note", detail, "a rank would start more threads than it has cores: unset it")]
    if share is not None and share < mine / 2:
        return [Finding("CPU cores", "note", detail, f"set engine.threads and data.threads to at most {share:.0f}")]
    return [Finding("CPU cores", "ok", detail)]


def _cpu_share() -> float | None:
    """The limit that a container has set on time, in cores."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else max(1.0, int(quota) / int(period))
    except (OSError, ValueError, ZeroDivisionError):
        return None


def probe_files() -> list[Finding]:
    """How many files a process may have open; the stream keeps its shards open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shown = ["unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}" for limit in (soft, hard)]
    detail = f"{shown[0]} (may be raised to {shown[1]})"
    if soft != resource.RLIM_INFINITY and soft < _LEAST_FILES:
        return [Finding("open files", "note", detail, f"ulimit -n {_LEAST_FILES} or more: shards are kept open")]
    return [Finding("open files", "ok", detail)]


def probe_disk() -> list[Finding]:
    """Space where runs will be written, if they are written here, and a home for caches."""
    here = Path.cwd()
    free = shutil.disk_usage(here).free
    detail = f"{free / _GIB:,.1f} GiB free in {here}"
    if not _writable(here):
        found = [Finding("disk", "note", f"{here} cannot be written", "start elsewhere, or set run.folder")]
    elif free < _LEAST_DISK:
        found = [Finding("disk", "note", detail, "make room, or set run.folder; `sopdist plan` tells what a run needs")]
    else:
        found = [Finding("disk", "ok", detail)]
    return [*found, _home()]


def _home() -> Finding:
    """Compiled operators, Triton's kernels and shards of remote splits are kept below it."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    there = next(parent for parent in (cache, *cache.parents) if parent.exists())
    if there.is_dir() and _writable(there):
        return Finding("caches", "ok", str(cache))
    advice = "set HOME or XDG_CACHE_HOME to a folder that can be written: compiled code is kept there"
    return Finding("caches", "broken", f"{cache} cannot be written", advice)


def _writable(folder: Path) -> bool:
    """By trying: permissions do not tell of a read-only mount."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def probe_shared_memory() -> list[Finding]:
    """What ranks of one machine share, and what dead ones have left in it."""
    if not SHARED.is_dir():
        return [Finding("shared memory", "missing", f"no {SHARED}", "mount a tmpfs there: NCCL and DeepSpeed use it")]
    usage = shutil.disk_usage(SHARED)
    detail = f"{usage.free / _GIB:,.2f} of {usage.total / _GIB:,.2f} GiB free in {SHARED}"
    if left := list(leftovers(SHARED)):
        size = sum(path.stat().st_size for path in left) / (1 << 20)
        names = " ".join(str(path) for path in left[:3]) + (" ..." if len(left) > 3 else "")
        detail += f"; {len(left)} files, {size:,.0f} MiB, of DeepSpeed runs that have ended"
        return [Finding("shared memory", "note", detail, f"remove them: rm {names}")]
    if usage.free < _LEAST_SHARED:
        return [Finding("shared memory", "note", detail, "too little for DeepSpeed and NCCL: docker run --shm-size=8g")]
    return [Finding("shared memory", "ok", detail)]


def leftovers(folder: Path) -> Iterator[Path]:
    """Files of this user's DeepSpeed runs that no process has mapped any more."""
    mine = [
        path for path in sorted(folder.glob("deepspeed_allreduce_buffer_*"))
        if (found := _OURS.fullmatch(path.name)) and int(found[1]) == os.getuid()
    ]  # fmt: skip
    in_use = "".join(_maps()) if mine else ""
    yield from (path for path in mine if not re.search(rf"{re.escape(str(path))}$", in_use, re.MULTILINE))


def _maps() -> Iterator[str]:
    for process in _PROCESSES.glob("[0-9]*/maps"):
        try:
            yield process.read_text(errors="replace")
        except OSError:  # it has ended, or is not ours; then the file is not ours either
            continue


def probe_slurm() -> list[Finding]:
    """Is this a job, and could one be started?"""
    tools = [tool for tool in ("sbatch", "srun") if shutil.which(tool)]
    job = os.environ.get("SLURM_JOB_ID")
    if job is not None:
        tasks, nodes = os.environ.get("SLURM_NTASKS", "?"), os.environ.get("SLURM_JOB_NUM_NODES", "?")
        detail = f"in job {job}: tasks {tasks}, nodes {nodes}"
        if "srun" not in tools:
            return [Finding("Slurm", "broken", f"{detail}; no srun", "put Slurm's commands on PATH to start ranks")]
        return [Finding("Slurm", "ok", detail)]
    if tools:
        return [Finding("Slurm", "ok", f"{' and '.join(tools)} found; not in a job")]
    return [Finding("Slurm", "note", "not here", "nothing to do: torchrun or deepspeed start ranks on one machine")]


PROBES: dict[str, Callable[[], list[Finding]]] = {
    "disk": probe_disk,
    "shared memory": probe_shared_memory,
    "open files": probe_files,
    "CPU cores": probe_cores,
    "Slurm": probe_slurm,
}

if __name__ == "__main__":
    answer(sys.argv[1:], PROBES)
