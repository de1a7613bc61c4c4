"""Start a real Slurm cluster of two nodes on this machine: its own munged, slurmctld and two slurmds.

    with cluster(os.environ) as slurm:
        job = slurm.submit(SCRIPTS / "train.sbatch", ["demo"], ["-N", "2"], folder)
        slurm.wait(job, "COMPLETED", 120)

It does not use or touch any Slurm or munge that runs on this machine. This module knows jobs, not what they do.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.support.launching import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel", "sinfo")
NODES = ("n1", "n2")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED")
_SYSTEM_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"

# cred_expire is also the time in seconds that a requeued job waits; sched_interval is how often Slurm schedules waiting
# jobs. config_overrides lets nodes have more cores than the machine. KillWait: seconds between SIGTERM and SIGKILL.
_CONF = """
ClusterName=sopdist
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmctldPort={ports[0]}
FirstJobId={job}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,batch_sched_delay=1
SlurmdParameters=config_overrides
MpiDefault=none
SwitchType=switch/none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
JobRequeue=1
KillWait=30
MailProg=/bin/true
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 RealMemory=4000
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 RealMemory=4000
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=60 State=UP
"""


def why_not() -> str:
    """The reason why no cluster can be started here; empty if one can."""
    if os.geteuid() != 0:
        return "needs root for Slurm's daemons"
    path = f"{os.environ.get('PATH', '')}{os.pathsep}{_SYSTEM_PATH}"
    missing = [program for program in PROGRAMS if shutil.which(program, path=path) is None]
    return f"needs {', '.join(missing)}: apt-get install slurm-wlm munge" if missing else ""


@dataclass(frozen=True)
class Cluster:
    """Two nodes that accept jobs."""

    folder: Path
    environ: Mapping[str, str]  # for Slurm's commands

    def submit(self, script: Path, arguments: Sequence[str], options: Sequence[str], cwd: Path, **more: str) -> int:
        """Run `sbatch OPTIONS SCRIPT ARGUMENTS` in a folder and return the job id."""
        output = ["--output", str(self.folder / "job-%A.out")]
        command = ["sbatch", "--parsable", *output, *options, str(script), *arguments]
        return int(self._ask(command, cwd=cwd, environ=self.environ | more))

    def output_of(self, job: int) -> str:
        path = self.folder / f"job-{job}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def facts_of(self, job: int) -> list[dict[str, str]]:
        """JobState, Restarts, ExitCode, ... of a job, or of each task of an array."""
        lines = self._ask(["scontrol", "--oneliner", "show", "job", str(job)]).splitlines()
        return [dict(re.findall(r"(\S+?)=(\S*)", line)) for line in lines if line.strip()]

    def states_of(self, job: int) -> list[str]:
        return [facts["JobState"] for facts in self.facts_of(job)]

    def wait(self, job: int, state: str, timeout: float) -> None:
        """Wait until all tasks of a job have ended in this state; raise AssertionError with its output otherwise."""
        self.wait_for(lambda: all(now in ENDED for now in self.states_of(job)), job, timeout)
        states = self.states_of(job)
        assert set(states) == {state}, f"job {job} ended as {states}\n{self.output_of(job)[-8000:]}"

    def wait_for(self, condition: Callable[[], bool], job: int, timeout: float) -> None:
        """Wait until the condition holds; raise AssertionError with the job's output on a timeout."""
        until = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > until:
                status = f"{self.states_of(job)}\n{self.output_of(job)[-8000:]}"
                raise AssertionError(f"not within {timeout} s; job {job} is {status}")
            time.sleep(0.2)

    def control(self, *arguments: str) -> str:
        """`scontrol ...`"""
        return self._ask(["scontrol", *arguments])

    def cancel(self, *arguments: str) -> None:
        """`scancel ...`"""
        self._ask(["scancel", *arguments])

    def ranks_of(self, job: int) -> dict[int, int]:
        """Process ids, by rank, of the running ranks that srun has started for a job."""
        found: dict[int, int] = {}
        for pid in processes_with(f"SLURM_JOB_ID={job}"):
            variables = dict(word.partition("=")[::2] for word in _words(pid, "environ"))
            is_rank = any(word.endswith("launch/train.py") for word in _words(pid, "cmdline")[:4])
            if is_rank and "SLURM_STEP_NUM_TASKS" in variables:
                found.setdefault(int(variables["SLURM_PROCID"]), pid)
        return found

    def _ask(self, command: Sequence[str], cwd: Path | None = None, environ: Mapping[str, str] | None = None) -> str:
        environ = dict(self.environ if environ is None else environ)
        ended = subprocess.run(command, env=environ, cwd=cwd, capture_output=True, text=True, timeout=60)
        assert ended.returncode == 0, f"{' '.join(command)}: {ended.stderr}"
        return ended.stdout


@contextmanager
def cluster(environ: Mapping[str, str]) -> Iterator[Cluster]:
    """Start the cluster, and stop all of its processes at the end. Jobs get this environment."""
    folder = Path(tempfile.mkdtemp(prefix="sopdist-slurm-"))  # a socket's path must be short
    conf = folder / "slurm.conf"
    job = 1 + secrets.randbelow(50_000)  # it determines the port of a job: two clusters must not share it
    conf.write_text(_CONF.format(folder=folder, ports=[free_port() for _ in range(3)], job=job))
    (folder / "state").mkdir()
    environ = {name: value for name, value in environ.items() if not name.startswith(("SLURM_", "SBATCH_", "SRUN_"))}
    environ |= {"SLURM_CONF": str(conf), "PATH": f"{environ.get('PATH', '')}{os.pathsep}{_SYSTEM_PATH}"}
    started: list[subprocess.Popen[bytes]] = []
    running = Cluster(folder, environ)
    try:
        _start_munge(folder, environ, started)
        started.append(_daemon(["slurmctld", "-D", "-f", str(conf)], folder / "slurmctld.out", environ))
        for node in NODES:
            command = ["slurmd", "-D", "-f", str(conf), "-N", node]
            started.append(_daemon(command, folder / f"slurmd-{node}.out", environ))
        _wait_until(lambda: _idle(environ), started, "the nodes do not become idle", folder)
        yield running
    finally:
        with suppress(Exception):
            running.cancel("--full", "--signal=KILL", "--user=root")
            running.cancel("--user=root")
        for process in reversed(started):
            process.terminate()
        for process in started:
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
        for pid in processes_with(f"SLURM_CONF={conf}"):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def processes_with(variable: str) -> list[int]:
    """Ids of processes with this variable, NAME=VALUE, in their environment."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in sorted(pids) if pid != os.getpid() and variable in _words(pid, "environ")]


def _words(pid: int, name: str) -> list[str]:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def _start_munge(folder: Path, environ: Mapping[str, str], started: list[subprocess.Popen[bytes]]) -> None:
    """Slurm's programs authenticate each other through munge. --force: only root needs access here."""
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    files = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munged.pid", "seed-file": "munge.seed"}
    options = [f"--{option}={folder / name}" for option, name in files.items()]
    command = ["munged", "--foreground", "--force", f"--log-file={folder / 'munged.log'}", *options]
    started.append(_daemon(command, folder / "munged.out", environ))
    _wait_until(lambda: (folder / "munge.socket").exists(), started, "munged does not open its socket", folder)


def _daemon(command: Sequence[str], output: Path, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    with output.open("wb") as file:
        return subprocess.Popen(
            command, env=dict(environ), cwd="/", stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            start_new_session=True,
        )  # fmt: skip


def _idle(environ: Mapping[str, str]) -> bool:
    command = ["sinfo", "--noheader", "--Node", "--format=%T"]
    ended = subprocess.run(command, env=dict(environ), capture_output=True, text=True, timeout=60)
    return ended.stdout.split() == ["idle"] * len(NODES)


def _wait_until(
    condition: Callable[[], bool], started: list[subprocess.Popen[bytes]], message: str, folder: Path
) -> None:
    until = time.monotonic() + 60
    while not condition():
        if time.monotonic() > until or any(process.poll() is not None for process in started):
            output = "".join(
                f"\n{path.name}: {path.read_text(errors='replace')[-2000:]}" for path in folder.glob("*.out")
            )
            raise AssertionError(f"{message}{output}")
        time.sleep(0.1)
