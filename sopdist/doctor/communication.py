"""Check that two processes can communicate: two real ones form a process group, as ranks do, and all-reduce a tensor.

The process of the probe is rank 0. It starts rank 1 first, so that both import torch at the same time, then opens the
store on a free port and sends the port to rank 1 through its stdin.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from datetime import timedelta
from typing import Any

from .finding import Finding
from .isolation import shorten

WHAT = "two processes"
_TIMEOUT = timedelta(seconds=10)


def probe_two_processes() -> list[Finding]:
    """As rank 0: all-reduce 1 and 2 with rank 1."""
    peer = subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        backend = "no torch"
        try:
            import torch.distributed as dist

            store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)
            assert peer.stdin is not None
            peer.stdin.write(f"{store.port}\n")
            peer.stdin.flush()
            backend = _backend()
            total = _all_reduce(store, 0, backend)
        except Exception as error:  # any error is the result of the probe
            return [_failure(backend, shorten(f"{type(error).__name__}: {error}"))]
        if total != 3.0:
            return [_failure(backend, f"1 + 2 gave {total:g}")]
        return [Finding(WHAT, "ok", f"{backend}: all-reduce of two ranks works", needed=True)]
    finally:
        peer.kill()
        peer.wait()


def run_rank_1() -> None:
    """The other process: read the port from stdin and take part in the all-reduce."""
    import torch.distributed as dist

    port = int(sys.stdin.readline())
    _all_reduce(dist.TCPStore("127.0.0.1", port, 2, is_master=False, timeout=_TIMEOUT), 1, _backend())


def _backend() -> str:
    """NCCL needs one GPU per rank."""
    import torch

    return "nccl" if torch.cuda.device_count() >= 2 else "gloo"


def _all_reduce(store: Any, rank: int, backend: str) -> float:
    import torch
    import torch.distributed as dist

    dist.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=_TIMEOUT)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    tensor = torch.tensor([rank + 1.0], device=device)
    dist.all_reduce(tensor)
    total = float(tensor)
    dist.barrier()
    dist.destroy_process_group()
    return total


def _failure(backend: str, detail: str) -> Finding:
    advice = "the host name must resolve to this machine (/etc/hosts), and the firewall must allow local connections"
    if os.environ.get("GLOO_SOCKET_IFNAME") or os.environ.get("NCCL_SOCKET_IFNAME"):
        advice = "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME is set: check that this machine has that interface"
    elif backend == "no torch":
        advice = "see torch"
    elif backend == "nccl":
        advice = "NCCL_DEBUG=INFO shows details; NCCL_P2P_DISABLE=1 helps on some machines"
    elif shutil.which("ip"):
        advice += "; set GLOO_SOCKET_IFNAME to an interface listed by `ip link`"
    return Finding(WHAT, "broken", f"{backend}: {detail}", advice, needed=True)


if __name__ == "__main__":
    run_rank_1()
