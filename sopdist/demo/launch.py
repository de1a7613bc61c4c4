"""Start one run of the demo with a real launcher, in its own session, and kill all of its processes at the end.

The stdout of the launcher and its ranks goes to a log file. Their stderr (progress bar, errors) stays on the terminal.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import DataError
from ..train.config import CONFIGS, find_config
from ..train.distributed.launch_env import LAUNCH_VARIABLES, free_port
from .results import is_finished

SCRIPT = Path(__file__).parents[2] / "launch" / "train.py"  # exists in the repository, not in an installed package
_LOG_LINES = 30  # lines of the log to show if a run fails


def ranks_and_device(ranks: int) -> tuple[int, str]:
    """The number of ranks to start and their device. Two ranks cannot share a GPU."""
    import torch

    from ..train.distributed.accelerator import device_type

    if device_type() == "cuda":
        return min(ranks, torch.cuda.device_count()), "GPU"
    return ranks, "CPU"


@dataclass(frozen=True)
class Launch:
    """One training run of the demo."""

    launcher: str
    ranks: int
    device: str
    method: str
    folder: Path  # of the demo
    labels: str
    epochs: int
    seed: int

    def run(self) -> None:
        """Train. Raises DataError with the end of the log if the run does not finish."""
        log = self.folder / "logs" / f"{self.method}.log"
        command = self.command()
        with log.open("w") as out:
            print(f"$ {shlex.join(command)}", file=out, flush=True)
            with _stop_on_signals():
                process = subprocess.Popen(command, stdout=out, env=self._environ(), start_new_session=True)
                try:
                    code = process.wait()
                finally:
                    kill_tree(process)
        # The exit code is unreliable: a killed launcher may return 0, and a rank may fail after the run has finished.
        if not is_finished(self.folder / "runs" / self.method):
            end = "\n  ".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
            raise DataError(f"the demo failed: {self.launcher} exited with code {code}; end of {log}:\n  {end}")

    def command(self) -> list[str]:
        """The command line, with every setting that differs from configs/demo.yaml."""
        # Started as a Python module: a script of this name on the PATH may belong to another Python.
        port = free_port()
        if self.launcher == "deepspeed":
            start = ["deepspeed.launcher.runner", f"--num_accelerators={self.ranks}", f"--master_port={port}"]
            program = [str(SCRIPT)] if SCRIPT.is_file() else ["--no_local_rank", "--module", "sopdist", "train"]
        else:
            start = ["torch.distributed.run", f"--nproc-per-node={self.ranks}", "--master-addr=127.0.0.1"]
            start.append(f"--master-port={port}")
            program = [str(SCRIPT)] if SCRIPT.is_file() else ["-m", "sopdist", "train"]
        # By its full path: a demo.yaml in the current folder is not meant.
        config = find_config(str(CONFIGS / "demo.yaml"))
        return [sys.executable, "-m", *start, *program, "--cfg", str(config), *self.overrides()]

    def overrides(self) -> list[str]:
        """Config overrides of this run."""
        return [
            f"run.name={self.method}",
            f"run.folder={self.folder / 'runs'}",
            f"run.seed={self.seed}",
            f"method.name={self.method}",
            f"data.root={self.folder / 'digits'}",
            f"data.labels={self.labels}",
            f"train.epochs={self.epochs}",
            f"engine.kind={'deepspeed' if self.launcher == 'deepspeed' else 'ddp'}",
            "engine.threads=1",  # more threads do not speed up such a small network, and slow it down on a busy machine
            "log.every=1000000",  # log only at the end of an epoch, so that a log line covers all of its samples
            "log.wandb=offline",
        ]

    def _environ(self) -> dict[str, str]:
        environ = {name: value for name, value in os.environ.items() if name not in LAUNCH_VARIABLES}
        environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environ.get('PATH', os.defpath)}"
        environ.setdefault("OMP_NUM_THREADS", "1")  # avoids a long warning of torchrun; each rank sets its own number
        if self.device == "CPU":
            environ["DS_ACCELERATOR"] = "cpu"
        return environ


def kill_tree(launcher: subprocess.Popen[Any]) -> None:
    """Kill a launcher and all of its descendants. A signal to the launcher alone may leave ranks running."""
    groups = set()
    for pid in (launcher.pid, *_descendants(launcher.pid)):
        with suppress(ProcessLookupError):
            groups.add(os.getpgid(pid))  # torchrun starts each rank in its own session
    for group in groups - {os.getpgrp()}:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    launcher.wait()


def _descendants(pid: int) -> list[int]:
    """All descendants of a process; none on systems without /proc, where only the launcher's own group is killed."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = stat.read_text(errors="replace").rpartition(")")[2].split()[1]
            children.setdefault(int(parent), []).append(int(stat.parent.name))
    found, pending = list[int](), [pid]
    while pending:
        below = children.get(pending.pop(), [])
        found += below
        pending += below
    return found


@contextmanager
def _stop_on_signals() -> Iterator[None]:
    """Treat SIGTERM and SIGHUP (`kill`, `timeout`, closed terminal) like Ctrl-C, so that no rank outlives the demo."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
