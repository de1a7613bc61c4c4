"""When a rank dies, the others name it and exit; a normal shutdown triggers nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from sopdist.train.distributed import watchdog
from sopdist.train.distributed.watchdog import LOST, Peer, is_alive
from sopdist.train.distributed.world import LaunchEnv, open_world
from sopdist.train.settings import EngineSettings
from tests.support.launching import REPOSITORY, free_port

KILLED = -signal.SIGKILL


def start_ranks(ranks: int, *arguments: str) -> tuple[list[int], list[str], list[int]]:
    """Start ranks without a launcher, which would kill them itself: return codes, stderr, pids."""
    port, processes = str(free_port()), []
    try:
        for rank in range(ranks):
            environ = os.environ | {
                "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
            }  # fmt: skip
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.support.watchdog_worker", *arguments],
                    cwd=REPOSITORY, env=environ, stderr=subprocess.PIPE, text=True,
                )
            )  # fmt: skip
        stderr = [process.communicate(timeout=200)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [process.returncode for process in processes], stderr, [process.pid for process in processes]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_named_once_and_the_others_exit(victim: int) -> None:
    codes, stderr, pids = start_ranks(3, "sleep", str(victim))
    assert codes == [KILLED if rank == victim else LOST for rank in range(3)]
    lines = [line for text in stderr for line in text.splitlines() if "stopping the job" in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"rank {victim} (pid {pids[victim]} on ")
    assert lines[0].endswith(") has died: stopping the job")
    assert "stopping the job" in stderr[1 if victim == 0 else 0]  # printed by the lowest remaining rank


@pytest.mark.long
def test_a_rank_on_another_machine_without_heartbeats_is_lost() -> None:
    codes, stderr, pids = start_ranks(2, "machines", "1", "4")
    assert codes == [LOST, KILLED]
    assert f"rank 1 (pid {pids[1]} on " in stderr[0]
    assert "sent no heartbeat for 4 s: stopping the job" in stderr[0]


@pytest.mark.long
def test_the_loss_of_the_machine_that_runs_the_store_is_noticed() -> None:
    codes, stderr, pids = start_ranks(2, "machines", "0", "4")
    assert codes == [KILLED, LOST]
    assert f"rank 0 (pid {pids[0]} on " in stderr[1]
    assert "can no longer be reached: stopping the job" in stderr[1]


@pytest.mark.parametrize("more", [[], ["0", "1"]])  # on one machine; on two, with a heartbeat timeout of a second
def test_a_normal_shutdown_triggers_nothing_although_ranks_exit_at_different_times(more: list[str]) -> None:
    codes, stderr, _ = start_ranks(2, "end", *more)
    assert codes == [0, 0], stderr
    assert "stopping the job" not in "".join(stderr)


def test_a_zombie_and_a_reused_pid_are_not_alive() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    peer = Peer(1, "here", "here", child.pid, watchdog._start_time(child.pid))
    assert is_alive(peer)
    assert not is_alive(Peer(1, "here", "here", child.pid, "another time"))
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie
    assert not is_alive(peer)
    child.wait()
    assert not is_alive(peer)
    assert child.stdin is not None
    child.stdin.close()


def test_one_rank_starts_no_watchdog_thread() -> None:
    world = open_world(LaunchEnv(), EngineSettings(threads=1))
    before = threading.active_count()
    watching = watchdog.start(world)
    assert threading.active_count() == before
    watching.stop()
    world.close()
