"""Reading a checkpoint: whole tensors by name, means over ranks, and clear words for what is not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sopdist.checkpoint import open_checkpoint
from sopdist.checkpoint.index import FORMAT, FileInfo, Index, Place, TensorInfo, commit, file_of
from sopdist.checkpoint.tensor_file import write_tensors
from sopdist.data.errors import DataError
from tests.checkpoint.checkpoints import about, common_tensors, own_tensors, rewrite_index, write


def write_as(folder: Path, of_ranks: list[dict[str, Tensor]]) -> Path:
    """A checkpoint of several ranks, written file by file."""
    folder.mkdir()
    index = Index(FORMAT, about(7, len(of_ranks)))
    for rank, tensors in enumerate(of_ranks):
        file = file_of(rank, len(of_ranks))
        written = write_tensors(folder / file, tensors)
        index.files[file] = FileInfo(written.size, written.sha256)
        for name, tensor in tensors.items():
            place = Place(file, name, 0, tensor.numel())
            index.tensors[name] = TensorInfo(tensor.dtype, tuple(tensor.shape), (place,))
    commit(folder, index)
    return folder


def test_a_checkpoint_says_what_it_is(tmp_path: Path) -> None:
    saved = open_checkpoint(write(tmp_path / "step", step=11))
    assert (saved.format, saved.step, saved.ranks, saved.epoch, saved.best) == (2, 11, 1, 0.5, 0.25)
    assert (saved.engine, saved.versions) == ("ddp", {"sopdist": "0"})
    assert (saved.fingerprint, saved.config) == ({"run.seed": 1}, {"run": {"name": "x"}})
    assert saved.files == {"rank-0-of-1.safetensors": (saved.folder / "rank-0-of-1.safetensors").stat().st_size}
    assert saved.tensors.keys() == common_tensors().keys() | own_tensors(0, 1).keys()


def test_the_network_has_its_weights_and_the_mean_of_all_ranks_statistics(tmp_path: Path) -> None:
    saved = open_checkpoint(write_as(tmp_path / "step", [common_tensors(), {}]))
    assert saved.network().keys() == {"layer.weight", "layer.bias", "batches"}
    ranks = [common_tensors() | own_tensors(0, 3), own_tensors(1, 3), own_tensors(2, 3)]
    saved = open_checkpoint(write_as(tmp_path / "three", ranks))
    network = saved.network()
    assert network["norm.running_mean"].tolist() == [1.0] * 4
    assert network["norm.running_mean"].dtype == torch.float32
    assert torch.equal(network["layer.weight"], common_tensors()["network/layer.weight"])
    assert [saved.statistics(rank)["norm.running_mean"][0].item() for rank in range(3)] == [0, 1, 2]


def test_the_mean_of_equal_statistics_is_what_they_are(tmp_path: Path) -> None:
    """Bit for bit, whatever the number of ranks: in float32 the sum of three of them would be rounded."""
    value = torch.tensor([0.1, 1e-30, 3e38, 1 / 3])
    saved = open_checkpoint(write_as(tmp_path / "step", [{f"statistics/{rank}/a": value} for rank in range(3)]))
    assert torch.equal(saved.statistics()["a"], value)


def test_a_section_is_all_that_begins_so(tmp_path: Path) -> None:
    saved = open_checkpoint(write(tmp_path / "step"))
    assert saved.section("optimizer/").keys() == {"layer.weight/momentum_buffer"}
    assert saved.section("nothing/") == {}


def test_noise_of_all_ranks_is_put_together_in_the_order_of_samples(tmp_path: Path) -> None:
    saved = open_checkpoint(write_as(tmp_path / "step", [own_tensors(0, 2), own_tensors(1, 2)]))
    whole = {name.removeprefix("noise/0/"): value for name, value in own_tensors(0, 1).items() if "noise" in name}
    found = saved.noise()
    assert all(torch.equal(found[name], whole[name]) for name in whole if name != "skipped")


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    saved = open_checkpoint(write_as(tmp_path / "step", [common_tensors()]))
    with pytest.raises(DataError, match=f"{saved.folder}: has no network/nothing"):
        saved.read("network/nothing")
    assert not saved.has_noise
    with pytest.raises(DataError, match=r"has no noise table; was it written with objective\.name = ce"):
        saved.noise()
    with pytest.raises(DataError, match="no such checkpoint"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(DataError, match="is not a complete checkpoint"):
        open_checkpoint(tmp_path)


def test_rows_of_a_rank_that_are_missing_are_missed(tmp_path: Path) -> None:
    saved = open_checkpoint(write_as(tmp_path / "step", [own_tensors(0, 2), common_tensors()]))
    with pytest.raises(DataError, match=r"of the noise table of ranks \[0\], and had 2 ranks"):
        saved.noise()
    with pytest.raises(DataError, match=r"'norm\.running_mean' has statistics of 1 ranks, not of 2"):
        saved.network()
    wrong = open_checkpoint(write_as(tmp_path / "wrong", [own_tensors(0, 2), own_tensors(1, 3)]))
    with pytest.raises(DataError, match="do not belong together"):
        wrong.noise()
    lacking = {name: value for name, value in own_tensors(1, 2).items() if name != "noise/1/u"}
    holes = open_checkpoint(write_as(tmp_path / "holes", [own_tensors(0, 2), lacking]))
    with pytest.raises(DataError, match="has no noise/1/u"):
        holes.noise()


@pytest.mark.parametrize(
    "name",
    ["statistics/0", "statistics/x/a", "statistics/2/a", "noise/-1/u", "noise/u", "tally/", "tally/2", "tally/0/x"],
)
def test_names_that_speak_of_a_rank_must_name_one_that_there_was(tmp_path: Path, name: str) -> None:
    folder = write_as(tmp_path / "step", [{name: torch.zeros(1)}, {}])
    with pytest.raises(DataError, match=f"'{name}' is of no rank; there were 2"):
        open_checkpoint(folder)


def test_only_what_is_asked_for_is_read(tmp_path: Path) -> None:
    """A file that is gone does not matter for what is not in it."""
    saved = open_checkpoint(write_as(tmp_path / "step", [common_tensors(), {"tally/1": torch.ones(1)}]))
    (saved.folder / "rank-1-of-2.safetensors").unlink()
    assert saved.network().keys() == {"layer.weight", "layer.bias", "batches"}
    with pytest.raises(DataError, match=r"rank-1-of-2\.safetensors: cannot be read: No such file"):
        saved.read("tally/1")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F64", "shape": [2]}, "network/a is 4 numbers of torch.float32, 2 of torch.float64 are listed"),
        ({"dtype": "I32"}, "network/a is 4 numbers of torch.float32, 4 of torch.int32 are listed"),
        ({"shape": [3]}, "network/a is 4 numbers of torch.float32, 3 of torch.float32 are listed"),
    ],
)
def test_a_file_that_does_not_hold_what_is_listed_is_refused(
    tmp_path: Path, entry: dict[str, Any], message: str
) -> None:
    folder = write_as(tmp_path / "step", [{"network/a": torch.ones(4)}])

    def change(tree: dict[str, Any]) -> None:
        found = tree["tensors"]["network/a"]
        found.update(entry)
        found["pieces"][0][2] = found["shape"][0]

    rewrite_index(folder, change)
    with pytest.raises(DataError, match=f"rank-0-of-1.safetensors: {message}"):
        open_checkpoint(folder).read("network/a")
