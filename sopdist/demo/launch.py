"""Start one run of the demo with a real launcher, in its own session, and kill all of its processes at the end.

The stdout of the launcher and its ranks goes to a log file. Their stderr (progress bar, errors) stays on the terminal.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from ..errors import DataError
from ..launching import end_of_log, kill_tree, launch_environ, stop_on_signals
from ..train.config import CONFIGS, find_config
from ..train.distributed.launch_env import free_port
from .results import is_finished

SCRIPT = Path(__file__).parents[2] / "launch" / "train.py"  # exists in the repository, not in an installed package


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
            with stop_on_signals():
                process = subprocess.Popen(command, stdout=out, env=self._environ(), start_new_session=True)
                try:
                    code = process.wait()
                finally:
                    kill_tree(process)
        # The exit code is unreliable: a killed launcher may return 0, and a rank may fail after the run has finished.
        if not is_finished(self.folder / "runs" / self.method):
            failed = f"the demo failed: {self.launcher} exited with code {code}"
            raise DataError(f"{failed}; end of {log}:\n{end_of_log(log)}")

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
        environ = launch_environ()
        environ.setdefault("OMP_NUM_THREADS", "1")  # avoids a long warning of torchrun; each rank sets its own number
        if self.device == "CPU":
            environ["DS_ACCELERATOR"] = "cpu"
        return environ
