"""One run of the demo: a real launcher in a session of its own, which ends with the demo whatever happens.

What the launcher and the ranks print goes to a log; progress bar and errors, which are on stderr, are shown.
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

from ..data.errors import DataError
from ..train.config import CONFIGS
from ..train.place import LAUNCH_VARIABLES, free_port
from .comparing import is_finished
from .config import write_config

SCRIPT = CONFIGS.parent / "launch" / "train.py"  # of the repository
_SHOWN = 30  # last lines of the log that are shown if a run fails


def on_device(ranks: int) -> tuple[int, str]:
    """How many ranks there can be, and on what: two ranks cannot share a GPU."""
    import torch

    from ..train.acceleration import device_type

    if device_type() == "cuda":
        return min(ranks, torch.cuda.device_count()), "GPU"
    return ranks, "CPU"


@dataclass(frozen=True)
class Launch:
    """What is started."""

    launcher: str
    ranks: int
    device: str
    objective: str
    folder: Path  # of the demo
    labels: str
    epochs: int
    seed: int

    def run(self) -> None:
        """Train; DataError, with the end of the log, if the run does not finish."""
        log = self.folder / "logs" / f"{self.objective}.log"
        command = self.command()
        with log.open("w") as out:
            print(f"$ {shlex.join(command)}", file=out, flush=True)
            with _signals_interrupt():
                process = subprocess.Popen(command, stdout=out, env=self._environ(), start_new_session=True)
                try:
                    code = process.wait()
                finally:
                    end_family(process)
        # Not the exit code: a launcher that was killed may return 0, and a rank may stumble when all is done.
        if not is_finished(self.folder / "runs" / self.objective):
            end = "\n  ".join(log.read_text(errors="replace").splitlines()[-_SHOWN:])
            raise DataError(f"the demo stops: {self.launcher} has ended with code {code}; the end of {log}:\n  {end}")

    def command(self) -> list[str]:
        """The command line, as one would type it, with everything that differs from configs/demo.yaml."""
        # Through Python, because a script of this name on the PATH may belong to another Python.
        port = free_port()
        if self.launcher == "deepspeed":
            start = ["deepspeed.launcher.runner", f"--num_accelerators={self.ranks}", f"--master_port={port}"]
            program = [str(SCRIPT)] if SCRIPT.is_file() else ["--no_local_rank", "--module", "sopdist", "train"]
        else:
            start = ["torch.distributed.run", f"--nproc-per-node={self.ranks}", "--master-addr=127.0.0.1"]
            start.append(f"--master-port={port}")
            program = [str(SCRIPT)] if SCRIPT.is_file() else ["-m", "sopdist", "train"]
        return [sys.executable, "-m", *start, *program, "--cfg", str(write_config(self.folder)), *self.overrides()]

    def overrides(self) -> list[str]:
        """Keys of the config that are the demo's own."""
        return [
            f"run.name={self.objective}",
            f"run.folder={self.folder / 'runs'}",
            f"run.seed={self.seed}",
            f"objective.name={self.objective}",
            f"data.root={self.folder / 'digits'}",
            f"data.labels={self.labels}",
            f"train.epochs={self.epochs}",
            f"engine.kind={'deepspeed' if self.launcher == 'deepspeed' else 'ddp'}",
            "engine.threads=1",  # so small a network is no faster with more, and much slower on a busy machine
            "log.every=1000000",  # only the line at the end of an epoch, which is then about all of its samples
            "log.wandb=offline",
        ]

    def _environ(self) -> dict[str, str]:
        environ = {name: value for name, value in os.environ.items() if name not in LAUNCH_VARIABLES}
        environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environ.get('PATH', os.defpath)}"
        environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun would say so at length; a rank sets its own number
        if self.device == "CPU":
            environ["DS_ACCELERATOR"] = "cpu"
        return environ


def end_family(launcher: subprocess.Popen[Any]) -> None:
    """End a launcher and everything it has started, at once: signals to a launcher may leave its ranks behind."""
    groups = set()
    for pid in (launcher.pid, *_descendants(launcher.pid)):
        with suppress(ProcessLookupError):
            groups.add(os.getpgid(pid))  # torchrun gives each rank a session of its own
    for group in groups - {os.getpgrp()}:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    launcher.wait()


def _descendants(pid: int) -> list[int]:
    """All processes below one. Where there is no /proc, none: the launcher's own group must do."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = stat.read_text(errors="replace").rpartition(")")[2].split()[1]
            children.setdefault(int(parent), []).append(int(stat.parent.name))
    found, waiting = list[int](), [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """An end by `kill`, `timeout` or a closed terminal is as good as Ctrl-C: nothing may go on without the demo."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
