"""Starts worker modules with real launchers, for tests, and always kills their processes in the end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from sopdist.train.distributed.launch_env import LAUNCH_VARIABLES

REPOSITORY = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def launch(
    launcher: str, module: str, arguments: Sequence[str], ranks: int = 2, timeout: float = 300.0
) -> subprocess.CompletedProcess[str]:
    """Run `python -m module arguments` on `ranks` ranks with torchrun or deepspeed, or with plain python on one."""
    port = str(free_port())
    command = {
        "python": [sys.executable, "-m", module],
        "torchrun": [
            str(BIN / "torchrun"), f"--nproc-per-node={ranks}", "--master-addr=127.0.0.1", f"--master-port={port}",
            "-m", module,
        ],
        "deepspeed": [
            str(BIN / "deepspeed"), f"--num_accelerators={ranks}", f"--master_port={port}", "--module", module,
        ],
    }[launcher]  # fmt: skip
    environ = {name: value for name, value in os.environ.items() if name not in LAUNCH_VARIABLES}
    environ |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(REPOSITORY)}
    environ["PATH"] = f"{BIN}{os.pathsep}{environ['PATH']}"
    process = subprocess.Popen(
        [*command, *arguments], cwd=REPOSITORY, env=environ, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        kill_group(process.pid)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def kill_group(leader: int) -> None:
    """Kill a launcher that was started in its own session, and its ranks."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return
