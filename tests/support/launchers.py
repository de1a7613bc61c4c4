"""Start `launch/train.py` as users do, with every launcher; find its ranks; leave no process behind.

    started = start("deepspeed", ["--cfg", "demo", "run.name=x"], folder, ranks=2)
    os.kill(started.ranks()[1], signal.SIGKILL)
    ended = started.wait(60)                    # ended.code, ended.out, ended.err

    ended = run("torchrun", [...], folder)      # start and wait

This module knows launchers and processes, not what a run does.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sopdist.train.distributed.launch_env import LAUNCH_VARIABLES
from tests.support.launching import BIN, REPOSITORY, free_port

SCRIPT = REPOSITORY / "launch" / "train.py"
ONE_PROCESS = ("python", "sopdist")
LAUNCHERS = ("deepspeed", "torchrun", "accelerate", "srun", *ONE_PROCESS)
_MARK = "SOPDIST_TEST_RUN"  # set for all processes of a run: a launcher may start ranks in another session


@dataclass(frozen=True)
class Ended:
    """A run that has ended."""

    code: int  # of the launcher; for `srun`, which is simulated, the first that is not 0
    out: str
    err: str

    @property
    def output(self) -> str:
        """The exit code and the end of the output, as the message of an assertion."""
        return f"exit code {self.code}\n{self.out[-3000:]}\n{self.err[-6000:]}"


@dataclass(frozen=True)
class Started:
    """A run that may still be running."""

    processes: tuple[subprocess.Popen[bytes], ...]  # the launcher; for `srun` the ranks themselves
    mark: str
    out: Path
    err: Path

    def ranks(self) -> list[int]:
        """Process ids of the running ranks, by rank. If the launcher starts none, the id of its process."""
        found: dict[int, int] = {}
        for pid in self.living():
            command, environ = _read(pid, "cmdline"), _variables(pid)
            rank = environ.get("RANK") or environ.get("SLURM_PROCID") or "0"
            runs = str(SCRIPT) in command or any(word.endswith("/sopdist") for word in command)
            if runs and not _is_launcher(command) and _parent(pid) not in found.values():
                found[int(rank)] = pid
        return [found[rank] for rank in sorted(found)]

    def ended(self) -> bool:
        """Whether no process is left. Checks the launcher, too: a new process has no environment to be found by yet."""
        return all(process.poll() is not None for process in self.processes) and not self.living()

    def living(self) -> list[int]:
        """Process ids of all processes of the run that have not ended."""
        pids = sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
        return [pid for pid in pids if _variables(pid).get(_MARK) == self.mark and _state(pid) not in "ZX"]

    def wait(self, timeout: float) -> Ended:
        """Wait until the run ends, and clean up. Raise AssertionError with the output on a timeout."""
        until = time.monotonic() + timeout
        try:
            codes = [process.wait(max(0.01, until - time.monotonic())) for process in self.processes]
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"did not end within {timeout} s\n{self._ended(-1).output}") from None
        self.kill()
        return self._ended(next((code for code in codes if code), 0))

    def kill(self) -> None:
        """Kill all processes that are left."""
        for pid in self.living():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.wait(30)

    def _ended(self, code: int) -> Ended:
        return Ended(code, self.out.read_text(errors="replace"), self.err.read_text(errors="replace"))


def run(
    launcher: str,
    arguments: Sequence[str],
    folder: Path,
    ranks: int = 2,
    timeout: float = 150.0,
    environ: Mapping[str, str] | None = None,
) -> Ended:
    """Start a run and wait until it ends."""
    return start(launcher, arguments, folder, ranks, environ).wait(timeout)


def start(
    launcher: str,
    arguments: Sequence[str],
    folder: Path,
    ranks: int = 2,
    environ: Mapping[str, str] | None = None,
) -> Started:
    """Start `launch/train.py ARGUMENTS` in a folder, on `ranks` ranks of this machine."""
    assert launcher not in ONE_PROCESS or ranks == 1, f"{launcher} starts one process"
    mark = uuid.uuid4().hex
    variables = _clean_environment() | {_MARK: mark} | dict(environ or {})
    out, err = folder / f"{mark}.out", folder / f"{mark}.err"
    command = [*_command(launcher, ranks, free_port()), *arguments]
    each = [_srun(rank, ranks, job=int(mark[:6], 16)) for rank in range(ranks)] if launcher == "srun" else [{}]
    with out.open("wb") as stdout, err.open("wb") as stderr:
        processes = tuple(
            subprocess.Popen(
                command, cwd=folder, env=variables | extra, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
            )
            for extra in each
        )  # fmt: skip
    return Started(processes, mark, out, err)


def _command(launcher: str, ranks: int, port: int) -> list[str]:
    return {
        "python": [sys.executable, str(SCRIPT)],
        "srun": [sys.executable, str(SCRIPT)],
        "sopdist": [str(BIN / "sopdist"), "train"],
        "torchrun": [
            str(BIN / "torchrun"), f"--nproc-per-node={ranks}", "--master-addr=127.0.0.1", f"--master-port={port}",
            str(SCRIPT),
        ],
        "deepspeed": [str(BIN / "deepspeed"), f"--num_accelerators={ranks}", f"--master_port={port}", str(SCRIPT)],
        # As a module: the program `accelerate` imports timm, which needs a torchvision that matches torch. Without
        # --multi_gpu and without GPUs it starts one process and ignores --num_processes.
        "accelerate": [
            sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", f"--num_processes={ranks}",
            "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no", f"--main_process_port={port}",
            str(SCRIPT),
        ],
    }[launcher]  # fmt: skip


def _srun(rank: int, ranks: int, job: int) -> dict[str, str]:
    """The variables of srun that a rank reads. The job id determines the master port."""
    return {
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": str(ranks),
        "SLURM_STEP_NUM_TASKS": str(ranks),
        "SLURM_STEP_TASKS_PER_NODE": str(ranks),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
    }


def _clean_environment() -> dict[str, str]:
    foreign = ("SLURM_", "ACCELERATE_", "TORCHELASTIC_", "WANDB_", "MASTER_")
    environ = {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCH_VARIABLES and not name.startswith(foreign)
    }
    environ |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(REPOSITORY)}
    environ.pop("TRITON_INTERPRET", None)
    environ["PATH"] = f"{BIN}{os.pathsep}{environ['PATH']}"
    return environ


def _is_launcher(command: Sequence[str]) -> bool:
    programs = ("/torchrun", "/deepspeed")
    modules = ("deepspeed.launcher.launch", "accelerate.commands.launch")
    return any(word.endswith(programs) or word in modules for word in command[:4])


def _read(pid: int, name: str) -> list[str]:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def _variables(pid: int) -> dict[str, str]:
    return dict(entry.partition("=")[::2] for entry in _read(pid, "environ") if "=" in entry)


def _state(pid: int) -> str:
    """R, S, ...; Z for a zombie, X if there is no such process."""
    stat = "".join(_read(pid, "stat"))
    return stat.rpartition(")")[2].split()[0] if stat else "X"


def _parent(pid: int) -> int:
    stat = "".join(_read(pid, "stat"))
    return int(stat.rpartition(")")[2].split()[1]) if stat else 0
