"""`sopdist checkpoint reshard`: the same state for another number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sopdist.checkpoint import open_checkpoint, verify_checkpoint
from sopdist.checkpoint.commands import resharding
from sopdist.checkpoint.index import FileInfo, commit, read_index
from sopdist.checkpoint.tensor_file import read_tensors, write_tensors
from sopdist.noise.dealing import deal
from sopdist.train.running import run_config
from tests.checkpoint.small_run import STEPS, Sopdist, step
from tests.e2e.launchers import run
from tests.e2e.records import lines_of

torch.set_num_threads(1)


@pytest.mark.parametrize("ranks", [1, 2, 3, 70])
def test_a_resharded_checkpoint_is_intact_and_of_the_same_state(
    sopdist: Sopdist, place: Path, tmp_path: Path, ranks: int
) -> None:
    """At 70 ranks and 61 samples some ranks have no rows."""
    told = sopdist("reshard", "runs/whole", "--ranks", ranks, "--out", tmp_path / "dealt")
    assert "intact" in told
    before, after = open_checkpoint(step(place / "runs" / "whole", 21)), verify_checkpoint(tmp_path / "dealt")
    assert after.ranks == ranks == len(after.files)
    assert {key: value for key, value in after.index.about.items() if key != "ranks"} == {
        key: value for key, value in before.index.about.items() if key != "ranks"
    }
    for found, wanted in (
        (after.network(), before.network()),
        (after.section("optimizer/"), before.section("optimizer/")),
        (after.noise(), before.noise()),
    ):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    tallies = sum(after.read(f"tally/{rank}") for rank in range(ranks))
    assert torch.equal(tallies, before.read("tally/0"))
    for rank in range(min(ranks, 5)):
        own = {name for name, info in after.tensors.items() if name.startswith(f"noise/{rank}/")}
        files = {piece.file for name in own for piece in after.tensors[name].pieces}
        assert files == {f"rank-{rank}-of-{ranks}.safetensors"}
        assert after.read(f"noise/{rank}/u").tolist() == before.noise()["u"][rank::ranks].tolist()


def test_statistics_and_sums_of_several_ranks_are_put_together(sopdist: Sopdist, tmp_path: Path) -> None:
    """Two ranks that differ: to three ranks goes the mean of both, and their sums are kept once."""
    sopdist("reshard", "runs/whole", "--ranks", 2, "--out", tmp_path / "two")
    second = tmp_path / "two" / "rank-1-of-2.safetensors"
    tensors = read_tensors(second)
    changed = {
        name: tensor + 2 if name.startswith(("statistics/", "tally/")) else tensor for name, tensor in tensors.items()
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
    sums = [before.read(f"tally/{rank}") for rank in range(2)]
    assert torch.equal(after.read("tally/0"), sums[0] + sums[1])
    assert not after.read("tally/2").any()
    assert torch.equal(again.read("tally/1"), sums[1])


def rewrite(folder: Path, path: Path, written: Any, index: Any) -> None:
    """The index of a checkpoint of which one file is another now."""
    index.files[path.name] = FileInfo(written.size, written.sha256)
    commit(folder, index)


def test_a_run_goes_on_from_a_resharded_checkpoint_bit_for_bit(sopdist: Sopdist, place: Path, tmp_path: Path) -> None:
    sopdist("reshard", step(Path("runs/whole"), 7), "--ranks", 3, "--out", tmp_path / "dealt")
    assert run_config("small.yaml", ["run.name=from-dealt"], resume=str(tmp_path / "dealt")) == 0
    found, wanted = ([line["loss"] for line in lines_of(place / "runs" / name)] for name in ("from-dealt", "whole"))
    assert found == wanted[STEPS:]
    ends = [open_checkpoint(step(place / "runs" / name, 21)) for name in ("whole", "from-dealt")]
    for section in ("network/", "optimizer/", "noise/"):
        found, wanted = ends[1].section(section), ends[0].section(section)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_rows_of_ranks_are_dealt_as_ranks_themselves_would(sopdist: Sopdist, place: Path, tmp_path: Path) -> None:
    sopdist("reshard", "runs/whole", "--ranks", 2, "--out", tmp_path / "two")
    sopdist("reshard", tmp_path / "two", "--ranks", 3, "--out", tmp_path / "three")
    whole = open_checkpoint(step(place / "runs" / "whole", 21)).noise()
    three = open_checkpoint(tmp_path / "three")
    for rank in range(3):
        wanted = deal([whole], rank, 3)
        found = three.section(f"noise/{rank}/")
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_reshard_replaces_nothing_and_leaves_nothing_half_done(
    sopdist: Sopdist, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").mkdir()
    told = sopdist("reshard", "runs/whole", "--ranks", 2, "--out", tmp_path / "there", code=1)
    assert "there: is there already; name a new folder" in told

    def full(path: Path, *_: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(resharding, "write_tensors", full)
    told = sopdist("reshard", "runs/whole", "--ranks", 2, "--out", tmp_path / "out", code=1)
    assert f"{tmp_path / 'out'}: cannot be written: No space left on device" in told
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_two_ranks_go_on_from_a_resharded_checkpoint_as_from_the_original(
    sopdist: Sopdist, place: Path, tmp_path: Path
) -> None:
    original = step(Path("runs/whole"), 7)
    sopdist("reshard", original, "--ranks", 2, "--out", tmp_path / "dealt")
    for name, begin in (("as-it-was", original), ("as-dealt", tmp_path / "dealt")):
        ended = run("torchrun", ["--cfg", "small.yaml", f"run.name={name}", "--resume", str(begin)], place, 2)
        assert ended.code == 0, ended.told
    found, wanted = ([line["loss"] for line in lines_of(place / "runs" / name)] for name in ("as-dealt", "as-it-was"))
    assert len(wanted) == 2 * STEPS
    assert found == wanted
    ends = [open_checkpoint(step(place / "runs" / name, 21)) for name in ("as-it-was", "as-dealt")]
    assert ends[0].tensors.keys() == ends[1].tensors.keys()
    assert all(torch.equal(ends[0].read(name), ends[1].read(name)) for name in ends[0].tensors)
