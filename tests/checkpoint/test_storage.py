"""Checkpoints written by ranks, each its own pieces, at once and in the background: real processes and gloo."""

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
from sopdist.checkpoint.pieces import Piece
from sopdist.checkpoint.reading import reason_of
from sopdist.checkpoint.tensor_file import DTYPES
from sopdist.checkpoint.writing import CheckpointWriter, Staging, begin_save, save_pieces
from sopdist.noise.rows import NoiseTable
from tests.checkpoint.checkpoints import about, common_tensors, write, write_in
from tests.ranks import Scenario, run_on_ranks

SAMPLES = 1003  # a prime, nearly: no number of ranks but 17 and 59 divides it
Cuts = dict[str, tuple[Tensor, list[int], list[int]]]  # by name: the tensor, where it is cut, who has which piece


def random_cuts(seed: int, ranks: int) -> Cuts:
    """Tensors of all types and shapes, cut anywhere (pieces may be empty) and dealt at random; whole ones, too."""
    generator = torch.Generator().manual_seed(seed)

    def number(most: int) -> int:
        return int(torch.randint(0, most + 1, (1,), generator=generator))

    cuts: Cuts = {}
    for name, dtype in DTYPES.items():
        for shape in [(), (number(9),), (number(4), number(5), 3)]:
            tensor = torch.randint(0, 2, shape, generator=generator).to(dtype)
            owners = torch.randperm(ranks, generator=generator).tolist()[: 1 + number(ranks - 1)]
            ends = sorted(number(tensor.numel()) for _ in owners[1:])
            cuts[f"{name}/{len(shape)}"] = (tensor, [0, *ends, tensor.numel()], owners)
    return cuts


def pieces_of(cuts: Cuts, rank: int) -> dict[str, Piece]:
    found = {}
    for name, (tensor, ends, owners) in cuts.items():
        for owner, (start, stop) in zip(owners, pairwise(ends), strict=True):
            if owner == rank:
                found[name] = Piece(tensor.flatten()[start:stop], start, tuple(tensor.shape))
    return found


def rank_of(group: dist.ProcessGroup | None) -> tuple[int, int]:
    return (0, 1) if group is None else (group.rank(), group.size())


def any_pieces_come_back_whole(folder: Path, group: dist.ProcessGroup | None) -> None:
    rank, ranks = rank_of(group)
    staging = Staging()
    for seed in range(4):
        cuts = random_cuts(seed, ranks)
        target = folder / f"step-{ranks:04}{seed:04}"
        writer = CheckpointWriter(target, rank, ranks, about(seed, ranks))
        if seed % 2:
            begin_save(pieces_of(cuts, rank), writer, group, staging).result(60)
        else:
            save_pieces(pieces_of(cuts, rank), writer, group)
        if rank == 0:
            saved = verify_checkpoint(target)
            assert saved.tensors.keys() == cuts.keys()
            for name, (tensor, _, _) in cuts.items():
                found = saved.read(name)
                assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape), name
                assert torch.equal(found, tensor), name


def mutation_after_staging_does_not_leak_in(folder: Path, group: dist.ProcessGroup | None) -> None:
    """The first rank is held up before its file is complete, while all go on and change what they have."""
    rank, ranks = rank_of(group)
    staging, go_on = Staging(), threading.Event()
    for step in (1, 2):  # the copies of the first are the memory of the second
        weight = torch.full((1000,), float(step)).view(10, 100)
        own = torch.full((rank + 1,), step)
        pieces = {f"tally/{rank}": Piece.whole(own)} | ({"network/weight": Piece.whole(weight)} if rank == 0 else {})
        target = folder / f"step-0000000{step}"
        writer = HeldUp(target, rank, ranks, about(step, ranks), go_on)
        go_on.clear()
        begun = begin_save(pieces, writer, group, staging)
        weight.fill_(-1)
        own.zero_()
        assert not begun.done()
        go_on.set()
        begun.result(60)
        if rank == 0:
            saved = verify_checkpoint(target)
            assert torch.equal(saved.read("network/weight"), torch.full((10, 100), float(step)))
            for other in range(ranks):
                assert saved.read(f"tally/{other}").tolist() == [step] * (other + 1)


def save(
    pieces: dict[str, Piece], writer: CheckpointWriter, group: dist.ProcessGroup | None, *, background: bool
) -> None:
    if background:
        begin_save(pieces, writer, group, Staging()).result(60)
    else:
        save_pieces(pieces, writer, group)


class HeldUp(CheckpointWriter):
    """Writes when it is told to."""

    def __init__(self, folder: Path, rank: int, ranks: int, facts: dict[str, Any], go_on: threading.Event) -> None:
        super().__init__(folder, rank, ranks, facts)
        self._go_on = go_on

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        assert self._go_on.wait(60)
        return super().write_data(plan, planner)


class Unlucky(CheckpointWriter):
    """A writer whose file cannot be written: something is in its way, or the disk is full."""

    trouble = ""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        if self.trouble == "in the way":
            (self._folder / self._file).mkdir()
        if self.trouble == "full":  # for all of this process: threads share it
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        try:
            return super().write_data(plan, planner)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def a_rank_that_cannot_write_is_heard_of_by_all(folder: Path, group: dist.ProcessGroup | None) -> None:
    """The last rank fails: no marker, the same error everywhere, an intact older checkpoint, and the next one works."""
    rank, ranks = rank_of(group)
    run = folder / f"run-{ranks}"
    older = write(run / "checkpoints" / "step-00000001", group=group)
    pieces = {f"tally/{rank}": Piece.whole(torch.zeros(10_000))}
    for step, (trouble, reason) in enumerate((("in the way", "directory"), ("full", "too large")), 2):
        target = run / "checkpoints" / f"step-0000000{step}"
        for background in (False, True):
            writer = Unlucky(target, rank, ranks, about(step, ranks))
            writer.trouble = trouble if rank == ranks - 1 else ""
            with pytest.raises(dcp.CheckpointException) as caught:
                save(pieces, writer, group, background=background)
            told = reason_of(caught.value)
            assert reason in told, told
            assert told.startswith(f"rank {ranks - 1}: ") == (ranks > 1)
            assert "Traceback" not in told
            assert not (target / "complete").exists()
            assert not list(target.glob("*.part"))
            if group is not None:
                dist.barrier(group)
        if rank == 0:
            assert complete_checkpoints(run) == [older]
            verify_checkpoint(older)
        if group is not None:
            dist.barrier(group)
    again = write(run / "checkpoints" / "step-00000003", pieces, group, step=3)
    if rank == 0:
        assert complete_checkpoints(run) == [older, again]
        verify_checkpoint(again)


def pieces_that_are_not_the_whole_are_never_complete(folder: Path, group: dist.ProcessGroup | None) -> None:
    """A gap, an overlap that makes up for a gap, two shapes, two types."""
    rank, ranks = rank_of(group)
    nine = torch.arange(9.0)
    of_ranks: list[dict[int, Piece]] = [
        {0: Piece(nine[:4], 0, (9,)), ranks - 1: Piece(nine[5:], 5, (9,))},
        {0: Piece(nine[:5], 0, (9,)), ranks - 1: Piece(nine[4:8], 4, (9,))},
        {0: Piece(nine[:5], 0, (9,)), ranks - 1: Piece(nine[5:], 5, (3, 3))},
        {0: Piece(nine[:5], 0, (9,)), ranks - 1: Piece(nine[5:].double(), 5, (9,))},
    ]
    for number, pieces in enumerate(of_ranks):
        mine = {"network/weight": pieces[rank]} if rank in pieces else {}
        target = folder / f"wrong-{ranks}-{number}"
        with pytest.raises(dcp.CheckpointException) as caught:
            write(target, mine, group)
        assert reason_of(caught.value) == "network/weight: the ranks' pieces are not the whole tensor"
        assert not (target / "complete").exists()


def noise_tables_are_dealt_to_any_number_of_ranks(folder: Path, group: dist.ProcessGroup | None) -> None:
    rank, ranks = rank_of(group)
    for layout in ("dense", "slots"):
        table = noise_table(layout, rank, ranks)
        pieces = {f"noise/{rank}/{name}": Piece.whole(value) for name, value in table.state_dict().items()}
        target = write(folder / f"{layout}-{ranks}", pieces, group)
        if rank == 0:
            saved = open_checkpoint(target)
            for stride in (1, 2, 3):
                for first in range(stride):
                    dealt, wanted = saved.noise(first, stride), noise_table(layout, first, stride).state_dict()
                    assert dealt.keys() == wanted.keys()
                    assert all(torch.equal(dealt[name], wanted[name]) for name in wanted if name != "skipped")


def noise_table(layout: str, first: int, stride: int) -> NoiseTable:
    """The rows of a rank; every value tells of which sample it is."""
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
    any_pieces_come_back_whole,
    mutation_after_staging_does_not_leak_in,
    a_rank_that_cannot_write_is_heard_of_by_all,
    noise_tables_are_dealt_to_any_number_of_ranks,
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_one_rank(tmp_path: Path, scenario: Any) -> None:
    scenario(tmp_path, None)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_more_ranks(tmp_path: Path, ranks: int) -> None:
    """One start for all scenarios, because a process takes seconds to import torch."""
    whole: list[Scenario] = [partial(scenario, tmp_path) for scenario in SCENARIOS]
    run_on_ranks([*whole, partial(pieces_that_are_not_the_whole_are_never_complete, tmp_path)], ranks, tmp_path)


def test_what_was_in_the_folder_before_is_gone(tmp_path: Path) -> None:
    """A save that was not completed may have left files of other ranks behind."""
    folder = tmp_path / "step-00000007"
    folder.mkdir()
    (folder / "rank-1-of-2.safetensors").write_bytes(b"of another save")
    verify_checkpoint(write(folder))


def test_the_first_rank_is_called_before_the_marker_and_after_it(tmp_path: Path) -> None:
    calls: list[tuple[str, bool]] = []
    marker = tmp_path / "step" / "complete"
    writer = CheckpointWriter(
        tmp_path / "step", 0, 1, about(7, 1),
        before=lambda: calls.append(("before", marker.exists())),
        after=lambda: calls.append(("after", marker.exists())),
    )  # fmt: skip
    save_pieces({"tally/0": Piece.whole(torch.zeros(1))}, writer, None)
    assert calls == [("before", False), ("after", True)]


def test_what_goes_wrong_before_the_marker_leaves_none(tmp_path: Path) -> None:
    def full() -> None:
        raise OSError(28, "No space left on device")

    writer = CheckpointWriter(tmp_path / "step", 0, 1, about(7, 1), before=full)
    with pytest.raises(dcp.CheckpointException) as caught:
        save_pieces({"tally/0": Piece.whole(torch.zeros(1))}, writer, None)
    assert "No space left on device" in reason_of(caught.value)
    assert not (tmp_path / "step" / "complete").exists()


def test_numbers_that_json_has_not_are_refused_when_writing(tmp_path: Path) -> None:
    """Rather than to write an index that nobody can read."""
    writer = CheckpointWriter(tmp_path / "step", 0, 1, about(7, 1) | {"best": float("nan")})
    with pytest.raises(dcp.CheckpointException):
        save_pieces({"tally/0": Piece.whole(torch.zeros(1))}, writer, None)
    assert not (tmp_path / "step" / "complete").exists()


def test_whole_tensors_keep_their_shape_in_the_file_for_other_programs(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    found = load_file(write(tmp_path / "step") / "rank-0-of-1.safetensors")
    for name, tensor in common_tensors().items():
        assert torch.equal(found[name], tensor)


def test_tensors_that_lie_otherwise_in_memory_are_staged_in_the_order_of_their_elements(tmp_path: Path) -> None:
    weight = torch.arange(120.0).view(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    turned = torch.arange(6).view(2, 3).T
    pieces = {"network/a": Piece.whole(weight), "network/b": Piece.whole(turned)}
    for number, background in enumerate((False, True)):
        writer = CheckpointWriter(tmp_path / str(number), 0, 1, about(7, 1))
        save(pieces, writer, None, background=background)
        network = verify_checkpoint(tmp_path / str(number)).network()
        assert torch.equal(network["a"], weight)
        assert torch.equal(network["b"], turned)


def test_copies_are_made_once_and_used_again() -> None:
    staging, weight = Staging(), torch.ones(1000)
    first = staging.stage({"pieces": {"w": Piece.whole(weight)}})["pieces"]["w"].values
    second = staging.stage({"pieces": {"w": Piece.whole(weight * 2)}})["pieces"]["w"].values
    assert first.data_ptr() == second.data_ptr() != weight.data_ptr()
    other = staging.stage({"pieces": {"w": Piece.whole(torch.ones(3))}})["pieces"]["w"].values
    assert other.shape == (3,)


def test_a_checkpoint_may_be_written_while_older_ones_are_read(tmp_path: Path) -> None:
    write_in(tmp_path, 1)
    saved = open_checkpoint(complete_checkpoints(tmp_path)[-1])
    write_in(tmp_path, 2)
    assert saved.read("tally/0").tolist() == [0, 0]
