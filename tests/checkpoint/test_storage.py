"""Checkpoints whose ranks write their own fragments in parallel and in the background, with real processes and gloo."""

from __future__ import annotations

import resource
import threading
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from sopdist.checkpoint import complete_checkpoints, open_checkpoint, verify_checkpoint
from sopdist.checkpoint.fragments import Fragment
from sopdist.checkpoint.reading import reason_of
from sopdist.checkpoint.tensor_file import DTYPES
from sopdist.checkpoint.writing import CheckpointWriter, Staging, save_fragments, start_save
from sopdist.noise.rows import NoiseTable
from tests.support.checkpoints import about, common_tensors, write, write_in
from tests.support.ranks import Scenario, run_on_ranks

SAMPLES = 1003  # 17 * 59: not divisible by any number of ranks used here
Cuts = dict[str, tuple[Tensor, list[int], list[int]]]  # by name: the tensor, where it is cut, owners of the fragments


def random_cuts(seed: int, ranks: int) -> Cuts:
    """Tensors of all dtypes and shapes, uncut or cut anywhere (fragments may be empty), with random owners."""
    generator = torch.Generator().manual_seed(seed)

    def number(maximum: int) -> int:
        return int(torch.randint(0, maximum + 1, (1,), generator=generator))

    cuts: Cuts = {}
    for name, dtype in DTYPES.items():
        for shape in [(), (number(9),), (number(4), number(5), 3)]:
            tensor = torch.randint(0, 2, shape, generator=generator).to(dtype)
            owners = torch.randperm(ranks, generator=generator).tolist()[: 1 + number(ranks - 1)]
            ends = sorted(number(tensor.numel()) for _ in owners[1:])
            cuts[f"{name}/{len(shape)}"] = (tensor, [0, *ends, tensor.numel()], owners)
    return cuts


def fragments_of(cuts: Cuts, rank: int) -> dict[str, Fragment]:
    found = {}
    for name, (tensor, ends, owners) in cuts.items():
        for owner, (start, stop) in zip(owners, pairwise(ends), strict=True):
            if owner == rank:
                found[name] = Fragment(tensor.flatten()[start:stop], start, tuple(tensor.shape))
    return found


def rank_of(group: dist.ProcessGroup | None) -> tuple[int, int]:
    return (0, 1) if group is None else (group.rank(), group.size())


def any_fragments_are_joined_to_full_tensors(folder: Path, group: dist.ProcessGroup | None) -> None:
    rank, ranks = rank_of(group)
    staging = Staging()
    for seed in range(4):
        cuts = random_cuts(seed, ranks)
        target = folder / f"step-{ranks:04}{seed:04}"
        writer = CheckpointWriter(target, rank, ranks, about(seed, ranks))
        if seed % 2:
            start_save(fragments_of(cuts, rank), writer, group, staging).result(60)
        else:
            save_fragments(fragments_of(cuts, rank), writer, group)
        if rank == 0:
            saved = verify_checkpoint(target)
            assert saved.tensors.keys() == cuts.keys()
            for name, (tensor, _, _) in cuts.items():
                found = saved.read(name)
                assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape), name
                assert torch.equal(found, tensor), name


def mutation_after_staging_does_not_leak_in(folder: Path, group: dist.ProcessGroup | None) -> None:
    """Writing is delayed while all ranks continue and change their tensors."""
    rank, ranks = rank_of(group)
    staging, release = Staging(), threading.Event()
    for step in (1, 2):  # the second reuses the buffers of the first
        weight = torch.full((1000,), float(step)).view(10, 100)
        own = torch.full((rank + 1,), step)
        fragments = {f"step_metrics/{rank}": Fragment.full(own)}
        fragments |= {"network/weight": Fragment.full(weight)} if rank == 0 else {}
        target = folder / f"step-0000000{step}"
        writer = DelayedWriter(target, rank, ranks, about(step, ranks), release)
        release.clear()
        started = start_save(fragments, writer, group, staging)
        weight.fill_(-1)
        own.zero_()
        assert not started.done()
        release.set()
        started.result(60)
        if rank == 0:
            saved = verify_checkpoint(target)
            assert torch.equal(saved.read("network/weight"), torch.full((10, 100), float(step)))
            for other in range(ranks):
                assert saved.read(f"step_metrics/{other}").tolist() == [step] * (other + 1)


def save(
    fragments: dict[str, Fragment], writer: CheckpointWriter, group: dist.ProcessGroup | None, *, background: bool
) -> None:
    if background:
        start_save(fragments, writer, group, Staging()).result(60)
    else:
        save_fragments(fragments, writer, group)


class DelayedWriter(CheckpointWriter):
    """Does not write before it is released."""

    def __init__(self, folder: Path, rank: int, ranks: int, facts: dict[str, Any], release: threading.Event) -> None:
        super().__init__(folder, rank, ranks, facts)
        self._release = release

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        assert self._release.wait(60)
        return super().write_data(plan, planner)


class FailingWriter(CheckpointWriter):
    """A writer whose file cannot be written: a folder of that name exists, or the disk is full."""

    failure = ""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        if self.failure == "blocked":
            (self._folder / self._file).mkdir()
        if self.failure == "full":  # applies to the process, hence to all threads
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        try:
            return super().write_data(plan, planner)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def a_rank_that_cannot_write_fails_the_save_on_all_ranks(folder: Path, group: dist.ProcessGroup | None) -> None:
    """The last rank fails: no marker, the same error everywhere, older checkpoints intact, and the next save works."""
    rank, ranks = rank_of(group)
    run = folder / f"run-{ranks}"
    older = write(run / "checkpoints" / "step-00000001", group=group)
    fragments = {f"step_metrics/{rank}": Fragment.full(torch.zeros(10_000))}
    for step, (failure, reason) in enumerate((("blocked", "directory"), ("full", "too large")), 2):
        target = run / "checkpoints" / f"step-0000000{step}"
        for background in (False, True):
            writer = FailingWriter(target, rank, ranks, about(step, ranks))
            writer.failure = failure if rank == ranks - 1 else ""
            with pytest.raises(dcp.CheckpointException) as caught:
                save(fragments, writer, group, background=background)
            message = reason_of(caught.value)
            assert reason in message, message
            assert message.startswith(f"rank {ranks - 1}: ") == (ranks > 1)
            assert "Traceback" not in message
            assert not (target / "complete").exists()
            assert not list(target.glob("*.part"))
            if group is not None:
                dist.barrier(group)
        if rank == 0:
            assert complete_checkpoints(run) == [older]
            verify_checkpoint(older)
        if group is not None:
            dist.barrier(group)
    again = write(run / "checkpoints" / "step-00000003", fragments, group, step=3)
    if rank == 0:
        assert complete_checkpoints(run) == [older, again]
        verify_checkpoint(again)


def fragments_that_do_not_form_the_tensor_are_never_complete(folder: Path, group: dist.ProcessGroup | None) -> None:
    """A gap, an overlap that makes up for a gap, two shapes, two types."""
    rank, ranks = rank_of(group)
    nine = torch.arange(9.0)
    bad_fragments: list[dict[int, Fragment]] = [
        {0: Fragment(nine[:4], 0, (9,)), ranks - 1: Fragment(nine[5:], 5, (9,))},
        {0: Fragment(nine[:5], 0, (9,)), ranks - 1: Fragment(nine[4:8], 4, (9,))},
        {0: Fragment(nine[:5], 0, (9,)), ranks - 1: Fragment(nine[5:], 5, (3, 3))},
        {0: Fragment(nine[:5], 0, (9,)), ranks - 1: Fragment(nine[5:].double(), 5, (9,))},
    ]
    for number, fragments in enumerate(bad_fragments):
        mine = {"network/weight": fragments[rank]} if rank in fragments else {}
        target = folder / f"wrong-{ranks}-{number}"
        with pytest.raises(dcp.CheckpointException) as caught:
            write(target, mine, group)
        assert reason_of(caught.value) == "network/weight: the fragments of the ranks do not form the full tensor"
        assert not (target / "complete").exists()


def noise_tables_are_resharded_to_any_number_of_ranks(folder: Path, group: dist.ProcessGroup | None) -> None:
    rank, ranks = rank_of(group)
    for layout in ("dense", "slots"):
        table = noise_table(layout, rank, ranks)
        fragments = {f"tables/noise/{rank}/{name}": Fragment.full(value) for name, value in table.state_dict().items()}
        target = write(folder / f"{layout}-{ranks}", fragments, group)
        if rank == 0:
            saved = open_checkpoint(target)
            for stride in (1, 2, 3):
                for first in range(stride):
                    found, wanted = saved.table("noise", first, stride), noise_table(layout, first, stride).state_dict()
                    assert found.keys() == wanted.keys()
                    assert all(torch.equal(found[name], wanted[name]) for name in wanted if name != "skipped")


def noise_table(layout: str, first: int, stride: int) -> NoiseTable:
    """The rows of a rank; every value identifies its sample."""
    table = NoiseTable(SAMPLES, 5, layout=layout, slots=3, seed=7, first=first, stride=stride)
    samples = torch.arange(SAMPLES)[first::stride]
    table.u.copy_(samples * 0.5)
    table.mean_loss.copy_(samples * 0.25)
    table.visits.copy_(samples % 4)
    table.v.copy_(samples[:, None] * 10.0 + torch.arange(table.v.shape[1]))
    if table.classes is not None:
        table.classes.copy_((samples[:, None] + torch.arange(3)) % 5)
    return table


SCENARIOS = [
    any_fragments_are_joined_to_full_tensors,
    mutation_after_staging_does_not_leak_in,
    a_rank_that_cannot_write_fails_the_save_on_all_ranks,
    noise_tables_are_resharded_to_any_number_of_ranks,
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_one_rank(tmp_path: Path, scenario: Any) -> None:
    scenario(tmp_path, None)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_more_ranks(tmp_path: Path, ranks: int) -> None:
    """Start processes once for all scenarios: importing torch takes seconds."""
    scenarios: list[Scenario] = [partial(scenario, tmp_path) for scenario in SCENARIOS]
    run_on_ranks(
        [*scenarios, partial(fragments_that_do_not_form_the_tensor_are_never_complete, tmp_path)], ranks, tmp_path
    )


def test_leftover_files_in_the_folder_are_removed(tmp_path: Path) -> None:
    """An incomplete save may have left files of other ranks."""
    folder = tmp_path / "step-00000007"
    folder.mkdir()
    (folder / "rank-1-of-2.safetensors").write_bytes(b"from another save")
    verify_checkpoint(write(folder))


def test_rank_0_calls_back_before_and_after_the_marker(tmp_path: Path) -> None:
    calls: list[tuple[str, bool]] = []
    marker = tmp_path / "step" / "complete"
    writer = CheckpointWriter(
        tmp_path / "step", 0, 1, about(7, 1),
        before=lambda: calls.append(("before", marker.exists())),
        after=lambda: calls.append(("after", marker.exists())),
    )  # fmt: skip
    save_fragments({"step_metrics/0": Fragment.full(torch.zeros(1))}, writer, None)
    assert calls == [("before", False), ("after", True)]


def test_a_failure_before_the_marker_leaves_no_marker(tmp_path: Path) -> None:
    def full() -> None:
        raise OSError(28, "No space left on device")

    writer = CheckpointWriter(tmp_path / "step", 0, 1, about(7, 1), before=full)
    with pytest.raises(dcp.CheckpointException) as caught:
        save_fragments({"step_metrics/0": Fragment.full(torch.zeros(1))}, writer, None)
    assert "No space left on device" in reason_of(caught.value)
    assert not (tmp_path / "step" / "complete").exists()


def test_nan_in_the_metadata_is_refused_when_writing(tmp_path: Path) -> None:
    """JSON has no NaN: the index could not be read back."""
    writer = CheckpointWriter(tmp_path / "step", 0, 1, about(7, 1) | {"best": float("nan")})
    with pytest.raises(dcp.CheckpointException):
        save_fragments({"step_metrics/0": Fragment.full(torch.zeros(1))}, writer, None)
    assert not (tmp_path / "step" / "complete").exists()


def test_full_tensors_keep_their_shape_in_the_file_for_other_programs(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    found = load_file(write(tmp_path / "step") / "rank-0-of-1.safetensors")
    for name, tensor in common_tensors().items():
        assert torch.equal(found[name], tensor)


def test_tensors_of_any_memory_format_are_saved_in_element_order(tmp_path: Path) -> None:
    weight = torch.arange(120.0).view(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    transposed = torch.arange(6).view(2, 3).T
    fragments = {"network/a": Fragment.full(weight), "network/b": Fragment.full(transposed)}
    for number, background in enumerate((False, True)):
        writer = CheckpointWriter(tmp_path / str(number), 0, 1, about(7, 1))
        save(fragments, writer, None, background=background)
        network = verify_checkpoint(tmp_path / str(number)).network()
        assert torch.equal(network["a"], weight)
        assert torch.equal(network["b"], transposed)


def test_staging_buffers_are_allocated_once_and_reused() -> None:
    staging, weight = Staging(), torch.ones(1000)
    first = staging.stage({"fragments": {"w": Fragment.full(weight)}})["fragments"]["w"].values
    second = staging.stage({"fragments": {"w": Fragment.full(weight * 2)}})["fragments"]["w"].values
    assert first.data_ptr() == second.data_ptr() != weight.data_ptr()
    other = staging.stage({"fragments": {"w": Fragment.full(torch.ones(3))}})["fragments"]["w"].values
    assert other.shape == (3,)


def test_a_checkpoint_can_be_written_while_older_ones_are_read(tmp_path: Path) -> None:
    write_in(tmp_path, 1)
    saved = open_checkpoint(complete_checkpoints(tmp_path)[-1])
    write_in(tmp_path, 2)
    assert saved.read("step_metrics/0").tolist() == [0, 0]
