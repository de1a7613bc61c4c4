"""Reading the launch environment, and communication between ranks."""

from __future__ import annotations

import json
import os
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sopdist.errors import ConfigError
from sopdist.train.distributed.accelerator import gpu_index
from sopdist.train.distributed.launch_env import first_host, tasks_per_node
from sopdist.train.distributed.world import LaunchEnv, World, export_launch_env, find_launch_env, open_world
from sopdist.train.settings import EngineSettings
from tests.support.launching import launch

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "77",
    "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip
DEEPSPEED = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_SIZE": "4", "CROSS_RANK": "1", "CROSS_SIZE": "2",
    "MASTER_ADDR": "a", "MASTER_PORT": "77",
}  # fmt: skip
BATCH_SCRIPT = {
    "SLURM_JOB_ID": "123", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "8",
    "SLURM_JOB_NODELIST": "gpu[003-004]", "SLURM_TASKS_PER_NODE": "4(x2)",
}  # fmt: skip
SRUN = BATCH_SCRIPT | {
    "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_STEP_NODELIST": "gpu[003-004]",
}  # fmt: skip


def test_plain_python_is_one_process() -> None:
    assert find_launch_env({"PATH": "/bin", "MASTER_ADDR": "left over"}) == LaunchEnv(0, 1, 0, 1, "python")


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        (TORCHRUN, "torchrun"),
        (TORCHRUN | {"ACCELERATE_MIXED_PRECISION": "no"}, "accelerate"),
        (DEEPSPEED, "deepspeed"),
    ],
)
def test_launchers_that_set_ranks_are_recognised(environ: dict[str, str], launcher: str) -> None:
    assert find_launch_env(environ) == LaunchEnv(5, 8, 1, 4, launcher, "a", 77)


def test_a_launcher_inside_a_slurm_step_takes_precedence() -> None:
    step = SRUN | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    assert find_launch_env(step | TORCHRUN).launcher == "torchrun"


def test_srun_alone_is_recognised_and_sets_the_variables_of_torch() -> None:
    env = find_launch_env(SRUN)
    assert (env.rank, env.size, env.local_rank, env.local_size, env.master) == (5, 8, 1, 4, "gpu003")
    environ: dict[str, str] = {}
    export_launch_env(env, environ)
    assert {name: environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")} == {
        "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
    }  # fmt: skip
    assert environ["MASTER_ADDR"] == "gpu003"
    assert find_launch_env(environ) == LaunchEnv(5, 8, 1, 4, "environment", "gpu003", env.port)


def test_ranks_of_a_slurm_step_share_a_port_that_other_steps_and_jobs_do_not_use() -> None:
    def port(**changes: str) -> int:
        return find_launch_env(SRUN | changes).port

    first = SRUN | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    assert find_launch_env(first).port == port()
    assert len({port(), port(SLURM_STEP_ID="1"), port(SLURM_JOB_ID="124")}) == 3
    assert find_launch_env(SRUN | {"MASTER_PORT": "55", "MASTER_ADDR": "mine"}).port == 55
    assert find_launch_env(SRUN | {"MASTER_PORT": "55", "MASTER_ADDR": "mine"}).master == "mine"


def test_a_slurm_step_on_one_node_needs_no_name_service() -> None:
    one = {"SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "8"}
    assert find_launch_env(SRUN | one).master == "127.0.0.1"


@pytest.mark.parametrize(
    "environ",
    [
        BATCH_SCRIPT,
        BATCH_SCRIPT | {"SLURM_STEP_ID": "4294967291", "SLURM_STEP_NUM_TASKS": "8"},  # the step id of the batch script
        BATCH_SCRIPT | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"},  # salloc's shell
    ],
)
def test_python_in_a_batch_script_is_a_single_process(environ: dict[str, str]) -> None:
    assert find_launch_env(environ) == LaunchEnv()


@pytest.mark.parametrize("family", ["OMPI_COMM_WORLD_{}RANK OMPI_COMM_WORLD_{}SIZE", "PMI"])
def test_ranks_of_mpirun_are_recognised(family: str) -> None:
    environ = (
        {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
        if family == "PMI"
        else {
            "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        }
    )  # fmt: skip
    assert find_launch_env(environ) == LaunchEnv(1, 2, 1, 2, "mpirun", "127.0.0.1", 29500)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0"}, "RANK is set but WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set but RANK is not"),
        (TORCHRUN | {"RANK": "8"}, "RANK = 8, but WORLD_SIZE = 8"),
        (TORCHRUN | {"LOCAL_RANK": "4"}, "LOCAL_RANK = 4, but LOCAL_WORLD_SIZE = 4"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE = 9, but WORLD_SIZE = 8"),
        (TORCHRUN | {"RANK": "one"}, "RANK = 'one' in the environment: must be an integer"),
        ({key: value for key, value in TORCHRUN.items() if key != "MASTER_PORT"}, "MASTER_PORT is not set"),
        (SRUN | TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0"}, "WORLD_SIZE = 1, but srun started 8 tasks"),
        (SRUN | {"SLURM_PROCID": "8"}, "SLURM_PROCID = 8, but SLURM_STEP_NUM_TASKS = 8"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, "SLURM_STEP_TASKS_PER_NODE = '2.x2.' contradicts"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "many"}, "must have the form"),
    ],
)
def test_contradictory_variables_are_named_in_the_error(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_launch_env(environ)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["n", "gpu-a", "rack1-"]),
            st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=3), max_size=2),
        ),
        min_size=1,
        max_size=3,
    )
)
def test_the_first_host_is_that_of_the_expanded_list(parts: list[tuple[str, list[list[int]]]]) -> None:
    written, hosts = [], []
    for prefix, brackets in parts:
        written.append(prefix + "x".join("[" + ",".join(f"{n:03}-{n + 2:03}" for n in row) + "]" for row in brackets))
        numbers = [[f"{m:03}" for n in row for m in range(n, n + 3)] for row in brackets]
        hosts += [prefix + "x".join(chosen) for chosen in product(*numbers)]
    assert first_host(",".join(written)) == hosts[0]


def test_slurm_lists_for_cpu_and_tasks_are_parsed() -> None:
    assert first_host("node[003-007,9]") == "node003"
    assert first_host("node[9,003-007],other") == "node9"
    assert first_host("login.example.org") == "login.example.org"
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]


def shared_memory() -> set[Path]:
    return set(Path("/dev/shm").glob("deepspeed*"))


@pytest.mark.parametrize(("launcher", "kind"), [("torchrun", "auto"), ("deepspeed", "deepspeed")])
def test_two_ranks_exchange_values_and_fail_together(launcher: str, kind: str, tmp_path: Path) -> None:
    before = shared_memory()
    process = launch(launcher, "tests.support.world_worker", [str(tmp_path), kind])
    assert process.returncode == 0, process.stderr[-5000:]
    seen: list[dict[str, Any]] = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    for rank, mine in enumerate(seen):
        assert mine["env"] == [rank, 2, rank, 2, "ddp" if kind == "auto" else kind, "cpu"]
        assert mine["launcher"] == launcher
        assert mine["threads"] == max(1, len(os.sched_getaffinity(0)) // 2)
        assert mine["sum"] == [2.0, 10.0]
        assert mine["max"] == [1.0, 0.0]
        assert mine["pending"] == [1.0, 0.2]
        assert mine["objects"] == [{"rank": r, "text": "ä" * r * 100, "none": None} for r in range(2)]
        assert mine["group"] == [2.0, 2.0]
        assert mine["all fine"] == "fine"
        assert mine["last fails"] == "CollectiveError: rank 1: error of 1"
        assert mine["all fail"] == "CollectiveError: error of 0"
        assert mine["on rank 0"] == {"by": 0}
        assert mine["rank 0 fails"] == "CollectiveError: error of 0"
        assert mine["after"] == 2.0  # and they are still in sync
        assert mine["closed"]
    assert seen[0]["a bug"] == "CollectiveError: rank 1: ZeroDivisionError: error of 1"
    assert seen[1]["a bug"] == "ZeroDivisionError: error of 1"
    assert shared_memory() <= before  # DeepSpeed's 66 MiB per rank, which would never be removed


def test_one_rank_needs_no_group_and_can_reopen_its_world(tmp_path: Path) -> None:
    process = launch("python", "tests.support.world_worker", [str(tmp_path), "auto"])
    assert process.returncode == 0, process.stderr[-5000:]
    mine = json.loads((tmp_path / "rank0.json").read_text())
    assert mine["env"] == [0, 1, 0, 1, "single", "cpu"]
    assert mine["sum"] == [1.0, 0.0]
    assert mine["last fails"] == "CollectiveError: error of 0"
    assert mine["objects"] == [{"rank": 0, "text": "", "none": None}]
    for _ in range(2):
        world = open_world(LaunchEnv(), EngineSettings(threads=1))
        assert world.new_group() is None
        world.close()


def test_a_launcher_of_one_process_opens_no_process_group(tmp_path: Path) -> None:
    process = launch("torchrun", "tests.support.world_worker", [str(tmp_path), "auto"], ranks=1)
    assert process.returncode == 0, process.stderr[-5000:]
    assert json.loads((tmp_path / "rank0.json").read_text())["env"] == [0, 1, 0, 1, "single", "cpu"]


@pytest.mark.parametrize("missing", ["deepspeed", "transformers"])
def test_a_missing_deepspeed_is_an_error_that_says_how_to_install_it(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    with pytest.raises(ConfigError, match=r"engine\.kind = deepspeed: .*pip install"):
        open_world(LaunchEnv(), EngineSettings(kind="deepspeed"))


def test_single_on_two_ranks_is_rejected_by_key() -> None:
    with pytest.raises(ConfigError, match=r"engine\.kind = single, but 2 ranks were started"):
        open_world(LaunchEnv(0, 2, 0, 2, "torchrun", "127.0.0.1", 1), EngineSettings(kind="single"))


def test_a_rank_uses_the_gpu_of_its_local_rank_or_the_only_visible_one() -> None:
    assert [gpu_index(rank, 4, 4) for rank in range(4)] == [0, 1, 2, 3]
    assert [gpu_index(rank, 2, 8) for rank in range(2)] == [0, 1]
    assert [gpu_index(rank, 4, 1) for rank in range(4)] == [0, 0, 0, 0]


@pytest.mark.parametrize("local_rank", range(4))
def test_more_ranks_than_gpus_on_a_node_are_rejected_on_every_rank_with_both_counts(local_rank: int) -> None:
    with pytest.raises(ConfigError, match=r"4 ranks were started on this node, but it has only 3 GPUs"):
        gpu_index(local_rank, 4, 3)


def test_the_gpu_of_a_single_process_has_an_index_like_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate gives it none, and a device without an index never equals the device of a tensor."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    accelerator: Any = SimpleNamespace(device=torch.device("cuda"))
    assert World(LaunchEnv(), "single", accelerator, 60.0).device == torch.device("cuda", 2)
