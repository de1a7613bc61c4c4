"""A rank that dies takes the others along, with a word about which it was; a normal end goes unnoticed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from sopdist.train import lifeline
from sopdist.train.lifeline import LOST, Peer, is_alive
from sopdist.train.settings import EngineSettings
from sopdist.train.world import Place, open_world
from tests.train.launching import REPOSITORY, free_port

KILLED = -signal.SIGKILL


def by_hand(ranks: int, *arguments: str) -> tuple[list[int], list[str], list[int]]:
    """Start ranks without a launcher, which would end them itself: return codes, what they said, process numbers."""
    port, processes = str(free_port()), []
    try:
        for rank in range(ranks):
            environ = os.environ | {
                "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
            }  # fmt: skip
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.train.lifeline_worker", *arguments],
                    cwd=REPOSITORY, env=environ, stderr=subprocess.PIPE, text=True,
                )
            )  # fmt: skip
        said = [process.communicate(timeout=200)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [process.returncode for process in processes], said, [process.pid for process in processes]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_named_once_and_the_others_end(victim: int) -> None:
    codes, said, pids = by_hand(3, "sleep", str(victim))
    assert codes == [KILLED if rank == victim else LOST for rank in range(3)]
    lines = [line for text in said for line in text.splitlines() if "the job stops" in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"rank {victim} (pid {pids[victim]} on ")
    assert lines[0].endswith(") has died: the job stops")
    assert "the job stops" in said[1 if victim == 0 else 0]  # by the lowest that is left


@pytest.mark.long
def test_a_rank_that_falls_silent_on_another_machine_is_lost() -> None:
    codes, said, pids = by_hand(2, "machines", "1", "4")
    assert codes == [LOST, KILLED]
    assert f"rank 1 (pid {pids[1]} on " in said[0]
    assert "gave no sign of life for 4 s: the job stops" in said[0]


@pytest.mark.long
def test_the_end_of_the_machine_that_keeps_the_store_is_noticed() -> None:
    codes, said, pids = by_hand(2, "machines", "0", "4")
    assert codes == [KILLED, LOST]
    assert f"rank 0 (pid {pids[0]} on " in said[1]
    assert "cannot be reached any more: the job stops" in said[1]


@pytest.mark.parametrize("more", [[], ["0", "1"]])  # on one machine; on two that allow a second of silence
def test_a_normal_end_goes_unnoticed_although_ranks_end_at_different_times(more: list[str]) -> None:
    codes, said, _ = by_hand(2, "end", *more)
    assert codes == [0, 0], said
    assert "the job stops" not in "".join(said)


def test_a_dead_process_that_nobody_buried_and_a_number_taken_by_another_are_not_alive() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    peer = Peer(1, "here", "here", child.pid, lifeline._born(child.pid))
    assert is_alive(peer)
    assert not is_alive(Peer(1, "here", "here", child.pid, "another time"))
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, but not buried
    assert not is_alive(peer)
    child.wait()
    assert not is_alive(peer)
    assert child.stdin is not None
    child.stdin.close()


def test_one_rank_watches_nobody() -> None:
    world = open_world(Place(), EngineSettings(threads=1))
    before = threading.active_count()
    line = lifeline.start(world)
    assert threading.active_count() == before
    line.stop()
    world.close()
