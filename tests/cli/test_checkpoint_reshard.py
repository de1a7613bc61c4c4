"""`sopdist checkpoint reshard`: the same state for another number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sopdist.checkpoint import open_checkpoint, resharding, verify_checkpoint
from sopdist.checkpoint.index import FileInfo, commit, read_index
from sopdist.checkpoint.tensor_file import read_tensors, write_tensors
from sopdist.sample_table import reshard
from sopdist.train.run import run_config
from tests.support.launchers import run
from tests.support.records import lines_of
from tests.support.small_run import STEPS, Sopdist, step

torch.set_num_threads(1)


@pytest.mark.parametrize("ranks", [1, 2, 3, 70])
def test_a_resharded_checkpoint_is_intact_and_has_the_same_state(
    sopdist: Sopdist, workspace: Path, tmp_path: Path, ranks: int
) -> None:
    """At 70 ranks and 61 samples some ranks have no rows."""
    output = sopdist("reshard", "runs/whole", "--ranks", ranks, "--out", tmp_path / "resharded")
    assert "intact" in output
    before, after = open_checkpoint(step(workspace / "runs" / "whole", 21)), verify_checkpoint(tmp_path / "resharded")
    assert after.ranks == ranks == len(after.files)
    assert {key: value for key, value in after.index.about.items() if key != "ranks"} == {
        key: value for key, value in before.index.about.items() if key != "ranks"
    }
    for found, wanted in (
        (after.network(), before.network()),
        (after.section("optimizer/"), before.section("optimizer/")),
        (after.table("noise"), before.table("noise")),
    ):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    tallies = sum(after.read(f"step_metrics/{rank}") for rank in range(ranks))
    assert torch.equal(tallies, before.read("step_metrics/0"))
    for rank in range(min(ranks, 5)):
        own = {name for name, info in after.tensors.items() if name.startswith(f"tables/noise/{rank}/")}
        files = {fragment.file for name in own for fragment in after.tensors[name].fragments}
        assert files == {f"rank-{rank}-of-{ranks}.safetensors"}
        assert after.read(f"tables/noise/{rank}/u").tolist() == before.table("noise")["u"][rank::ranks].tolist()


def test_statistics_and_sums_of_several_ranks_are_combined(sopdist: Sopdist, tmp_path: Path) -> None:
    """Two ranks that differ: three ranks get the mean of their statistics, and their sums are counted once."""
    sopdist("reshard", "runs/whole", "--ranks", 2, "--out", tmp_path / "two")
    second = tmp_path / "two" / "rank-1-of-2.safetensors"
    tensors = read_tensors(second)
    changed = {
        name: tensor + 2 if name.startswith(("statistics/", "step_metrics/")) else tensor
        for name, tensor in tensors.items()
    }
    rewrite(tmp_path / "two", second, write_tensors(second, changed), read_index(tmp_path / "two"))
    before = verify_checkpoint(tmp_path / "two")
    sopdist("reshard", tmp_path / "two", "--ranks", 3, "--out", tmp_path / "three")
    sopdist("reshard", tmp_path / "two", "--ranks", 2, "--out", tmp_path / "again")
    after, again = open_checkpoint(tmp_path / "three"), open_checkpoint(tmp_path / "again")
    names = before.statistics(0)
    assert names
    for name, first in names.items():
        for rank in range(3):
            assert torch.allclose(after.statistics(rank)[name], first + 1)
        assert torch.equal(again.statistics(1)[name], before.statistics(1)[name])
    sums = [before.read(f"step_metrics/{rank}") for rank in range(2)]
    assert torch.equal(after.read("step_metrics/0"), sums[0] + sums[1])
    assert not after.read("step_metrics/2").any()
    assert torch.equal(again.read("step_metrics/1"), sums[1])


def rewrite(folder: Path, path: Path, written: Any, index: Any) -> None:
    """Update the index of a checkpoint after one file was replaced."""
    index.files[path.name] = FileInfo(written.size, written.sha256)
    commit(folder, index)


def test_a_run_resumes_from_a_resharded_checkpoint_bit_for_bit(
    sopdist: Sopdist, workspace: Path, tmp_path: Path
) -> None:
    sopdist("reshard", step(Path("runs/whole"), 7), "--ranks", 3, "--out", tmp_path / "resharded")
    assert run_config("small.yaml", ["run.name=resumed"], resume=str(tmp_path / "resharded")) == 0
    found, wanted = ([line["loss"] for line in lines_of(workspace / "runs" / name)] for name in ("resumed", "whole"))
    assert found == wanted[STEPS:]
    ends = [open_checkpoint(step(workspace / "runs" / name, 21)) for name in ("whole", "resumed")]
    for section in ("network/", "optimizer/", "tables/noise/"):
        found, wanted = ends[1].section(section), ends[0].section(section)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_rows_are_resharded_as_ranks_would_do_it_at_load_time(
    sopdist: Sopdist, workspace: Path, tmp_path: Path
) -> None:
    sopdist("reshard", "runs/whole", "--ranks", 2, "--out", tmp_path / "two")
    sopdist("reshard", tmp_path / "two", "--ranks", 3, "--out", tmp_path / "three")
    full = open_checkpoint(step(workspace / "runs" / "whole", 21)).table("noise")
    three = open_checkpoint(tmp_path / "three")
    for rank in range(3):
        wanted = reshard([full], rank, 3)
        found = three.section(f"tables/noise/{rank}/")
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_reshard_overwrites_nothing_and_leaves_no_partial_checkpoint(
    sopdist: Sopdist, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").mkdir()
    output = sopdist("reshard", "runs/whole", "--ranks", 2, "--out", tmp_path / "there", code=1)
    assert "there: already exists; name a new folder" in output

    def full(path: Path, *_: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(resharding, "write_tensors", full)
    output = sopdist("reshard", "runs/whole", "--ranks", 2, "--out", tmp_path / "out", code=1)
    assert f"{tmp_path / 'out'}: cannot be written: No space left on device" in output
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_two_ranks_resume_from_a_resharded_checkpoint_as_from_the_original(
    sopdist: Sopdist, workspace: Path, tmp_path: Path
) -> None:
    original = step(Path("runs/whole"), 7)
    sopdist("reshard", original, "--ranks", 2, "--out", tmp_path / "resharded")
    for name, start in (("from-original", original), ("from-resharded", tmp_path / "resharded")):
        ended = run("torchrun", ["--cfg", "small.yaml", f"run.name={name}", "--resume", str(start)], workspace, 2)
        assert ended.code == 0, ended.output
    found, wanted = (
        [line["loss"] for line in lines_of(workspace / "runs" / name)] for name in ("from-resharded", "from-original")
    )
    assert len(wanted) == 2 * STEPS
    assert found == wanted
    ends = [open_checkpoint(step(workspace / "runs" / name, 21)) for name in ("from-original", "from-resharded")]
    assert ends[0].tensors.keys() == ends[1].tensors.keys()
    assert all(torch.equal(ends[0].read(name), ends[1].read(name)) for name in ends[0].tensors)
