"""Can two processes talk? Two real ones meet as the ranks of a run do, and add their numbers.

`python -m sopdist.doctor.talk 'two processes'` is rank 0. It starts rank 1 at once, so that both load torch at the same
time, opens the store on a free port, and tells rank 1 the port through its stdin.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from datetime import timedelta
from typing import Any

from .finding import Finding
from .isolation import answer, short

WHAT = "two processes"
_RANK_1 = "--rank-1"
_PATIENCE = timedelta(seconds=10)


def probe_talk() -> list[Finding]:
    """As rank 0: add 1 and 2 with rank 1."""
    peer = subprocess.Popen(
        [sys.executable, "-m", f"{__package__}.talk", _RANK_1],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        backend = "no torch"
        try:
            import torch.distributed as dist

            store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False, timeout=_PATIENCE)
            assert peer.stdin is not None
            peer.stdin.write(f"{store.port}\n")
            peer.stdin.flush()
            backend = _backend()
            total = _meet(store, 0, backend)
        except Exception as error:  # whatever it is, it is the answer
            return [_failure(backend, short(f"{type(error).__name__}: {error}"))]
        if total != 3.0:
            return [_failure(backend, f"1 + 2 came out as {total:g}")]
        return [Finding(WHAT, "ok", f"{backend}: two ranks added their numbers", needed=True)]
    finally:
        peer.kill()
        peer.wait()


def talk_as_rank_1() -> None:
    """The other side."""
    import torch.distributed as dist

    port = int(sys.stdin.readline())
    _meet(dist.TCPStore("127.0.0.1", port, 2, is_master=False, timeout=_PATIENCE), 1, _backend())


def _backend() -> str:
    """NCCL wants a GPU for each rank."""
    import torch

    return "nccl" if torch.cuda.device_count() >= 2 else "gloo"


def _meet(store: Any, rank: int, backend: str) -> float:
    import torch
    import torch.distributed as dist

    dist.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=_PATIENCE)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    number = torch.tensor([rank + 1.0], device=device)
    dist.all_reduce(number)
    total = float(number)
    dist.barrier()
    dist.destroy_process_group()
    return total


def _failure(backend: str, detail: str) -> Finding:
    advice = "this machine's name must lead to it (/etc/hosts), and a firewall must let it talk to itself"
    if os.environ.get("GLOO_SOCKET_IFNAME") or os.environ.get("NCCL_SOCKET_IFNAME"):
        advice = "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME is set: does this machine have that interface?"
    elif backend == "no torch":
        advice = "see torch"
    elif backend == "nccl":
        advice = "NCCL_DEBUG=INFO tells more; NCCL_P2P_DISABLE=1 helps on some machines"
    elif shutil.which("ip"):
        advice += "; GLOO_SOCKET_IFNAME names an interface of `ip link`"
    return Finding(WHAT, "broken", f"{backend}: {detail}", advice, needed=True)


if __name__ == "__main__":
    if sys.argv[1:] == [_RANK_1]:
        talk_as_rank_1()
    else:
        answer(sys.argv[1:], {WHAT: probe_talk})
