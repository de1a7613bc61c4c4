"""The strong view on a CPU: the policy, a few images at a time, in threads that share the work."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray

from ..augment.policy import Policy, apply_policy
from .pixels import Normalizer, Pixels


def open_pool(threads: int, name: str) -> ThreadPoolExecutor:
    """Threads in each of which torch computes alone.

    Otherwise every one of them would get helpers of its own for the policy's operations, all on the same cores. The
    number that torch has for a thread is set in that thread; but with it, torch also changes what threads to come will
    get. So all threads are started here, and the number is put back.
    """
    before = torch.get_num_threads()
    pool = ThreadPoolExecutor(threads, thread_name_prefix=name, initializer=torch.set_num_threads, initargs=(1,))
    all_started = threading.Barrier(threads + 1)
    for _ in range(threads):
        pool.submit(all_started.wait)
    all_started.wait()
    torch.set_num_threads(before)
    return pool


def strong_view(
    pixels: Pixels, draws: NDArray[np.float64], policy: Policy, normalize: Normalizer, to: NDArray[np.float32]
) -> None:
    """Apply the policy to (n, size, size, 3) bytes and write them, normalised, to `to`."""
    changed = apply_policy(torch.from_numpy(pixels), torch.from_numpy(draws), policy)
    normalize(changed.numpy(), to)
