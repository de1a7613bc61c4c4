"""Reading a checkpoint: full tensors by name, means over ranks, and clear errors for missing tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sopdist.checkpoint import open_checkpoint
from sopdist.checkpoint.index import FORMAT, FileInfo, FragmentLocation, Index, TensorInfo, commit, file_of
from sopdist.checkpoint.tensor_file import write_tensors
from sopdist.errors import DataError
from tests.support.checkpoints import about, common_tensors, own_tensors, rewrite_index, write


def write_as(folder: Path, rank_tensors: list[dict[str, Tensor]]) -> Path:
    """Write a checkpoint of several ranks, file by file."""
    folder.mkdir()
    index = Index(FORMAT, about(7, len(rank_tensors)))
    for rank, tensors in enumerate(rank_tensors):
        file = file_of(rank, len(rank_tensors))
        written = write_tensors(folder / file, tensors)
        index.files[file] = FileInfo(written.size, written.sha256)
        for name, tensor in tensors.items():
            location = FragmentLocation(file, name, 0, tensor.numel())
            index.tensors[name] = TensorInfo(tensor.dtype, tuple(tensor.shape), (location,))
    commit(folder, index)
    return folder


def test_a_checkpoint_has_its_metadata(tmp_path: Path) -> None:
    saved = open_checkpoint(write(tmp_path / "step", step=11))
    assert (saved.format, saved.step, saved.ranks, saved.epoch, saved.best) == (3, 11, 1, 0.5, 0.25)
    assert (saved.engine, saved.versions) == ("ddp", {"sopdist": "0"})
    assert (saved.fingerprint, saved.config) == ({"run.seed": 1}, {"run": {"name": "x"}})
    assert saved.files == {"rank-0-of-1.safetensors": (saved.folder / "rank-0-of-1.safetensors").stat().st_size}
    assert saved.tensors.keys() == common_tensors().keys() | own_tensors(0, 1).keys()


def test_the_network_has_its_weights_and_the_mean_statistics_of_all_ranks(tmp_path: Path) -> None:
    saved = open_checkpoint(write_as(tmp_path / "step", [common_tensors(), {}]))
    assert saved.network().keys() == {"layer.weight", "layer.bias", "batches"}
    ranks = [common_tensors() | own_tensors(0, 3), own_tensors(1, 3), own_tensors(2, 3)]
    saved = open_checkpoint(write_as(tmp_path / "three", ranks))
    network = saved.network()
    assert network["norm.running_mean"].tolist() == [1.0] * 4
    assert network["norm.running_mean"].dtype == torch.float32
    assert torch.equal(network["layer.weight"], common_tensors()["network/layer.weight"])
    assert [saved.statistics(rank)["norm.running_mean"][0].item() for rank in range(3)] == [0, 1, 2]


def test_the_mean_of_equal_statistics_is_exact(tmp_path: Path) -> None:
    """Bit for bit, for any number of ranks: in float32 the sum of three values would be rounded."""
    value = torch.tensor([0.1, 1e-30, 3e38, 1 / 3])
    saved = open_checkpoint(write_as(tmp_path / "step", [{f"statistics/{rank}/a": value} for rank in range(3)]))
    assert torch.equal(saved.statistics()["a"], value)


def test_a_section_holds_all_tensors_with_a_prefix(tmp_path: Path) -> None:
    saved = open_checkpoint(write(tmp_path / "step"))
    assert saved.section("optimizer/").keys() == {"layer.weight/momentum_buffer"}
    assert saved.section("nothing/") == {}


def test_noise_rows_of_all_ranks_are_joined_in_sample_order(tmp_path: Path) -> None:
    saved = open_checkpoint(write_as(tmp_path / "step", [own_tensors(0, 2), own_tensors(1, 2)]))
    full = {name.removeprefix("tables/noise/0/"): value for name, value in own_tensors(0, 1).items() if "noise" in name}
    found = saved.table("noise")
    assert all(torch.equal(found[name], full[name]) for name in full if name != "skipped")


def test_missing_tensors_and_checkpoints_are_named(tmp_path: Path) -> None:
    saved = open_checkpoint(write_as(tmp_path / "step", [common_tensors()]))
    with pytest.raises(DataError, match=f"{saved.folder}: has no network/nothing"):
        saved.read("network/nothing")
    assert "noise" not in saved.table_names
    with pytest.raises(DataError, match=r"has no noise table; the method it was trained with does not use one"):
        saved.table("noise")
    with pytest.raises(DataError, match="no such checkpoint"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(DataError, match="is not a complete checkpoint"):
        open_checkpoint(tmp_path)


def test_missing_rows_of_a_rank_are_an_error(tmp_path: Path) -> None:
    saved = open_checkpoint(write_as(tmp_path / "step", [own_tensors(0, 2), common_tensors()]))
    with pytest.raises(DataError, match=r"has noise rows of ranks \[0\], but had 2 ranks"):
        saved.table("noise")
    with pytest.raises(DataError, match=r"'norm\.running_mean' has statistics of 1 ranks, not of 2"):
        saved.network()
    wrong = open_checkpoint(write_as(tmp_path / "wrong", [own_tensors(0, 2), own_tensors(1, 3)]))
    with pytest.raises(DataError, match="do not belong together"):
        wrong.table("noise")
    lacking = {name: value for name, value in own_tensors(1, 2).items() if name != "tables/noise/1/u"}
    holes = open_checkpoint(write_as(tmp_path / "holes", [own_tensors(0, 2), lacking]))
    with pytest.raises(DataError, match="has no tables/noise/1/u"):
        holes.table("noise")


@pytest.mark.parametrize(
    "name",
    [
        "statistics/0",
        "statistics/x/a",
        "statistics/2/a",
        "tables/noise/-1/u",
        "tables/noise/u",
        "step_metrics/",
        "step_metrics/2",
        "step_metrics/0/x",
    ],
)
def test_names_with_a_rank_must_name_an_existing_one(tmp_path: Path, name: str) -> None:
    folder = write_as(tmp_path / "step", [{name: torch.zeros(1)}, {}])
    with pytest.raises(DataError, match=f"'{name}' belongs to no rank; there were 2"):
        open_checkpoint(folder)


def test_only_requested_tensors_are_read(tmp_path: Path) -> None:
    """A missing file does not matter if none of its tensors is requested."""
    saved = open_checkpoint(write_as(tmp_path / "step", [common_tensors(), {"step_metrics/1": torch.ones(1)}]))
    (saved.folder / "rank-1-of-2.safetensors").unlink()
    assert saved.network().keys() == {"layer.weight", "layer.bias", "batches"}
    with pytest.raises(DataError, match=r"rank-1-of-2\.safetensors: cannot be read: No such file"):
        saved.read("step_metrics/1")


@pytest.mark.parametrize(
    ("entry", "listed"),
    [
        ({"dtype": "F64", "shape": [2]}, "2 of torch.float64"),
        ({"dtype": "I32"}, "4 of torch.int32"),
        ({"shape": [3]}, "3 of torch.float32"),
    ],
)
def test_a_file_that_does_not_match_the_index_is_refused(tmp_path: Path, entry: dict[str, Any], listed: str) -> None:
    folder = write_as(tmp_path / "step", [{"network/a": torch.ones(4)}])

    def change(tree: dict[str, Any]) -> None:
        found = tree["tensors"]["network/a"]
        found.update(entry)
        found["pieces"][0][2] = found["shape"][0]

    rewrite_index(folder, change)
    message = f"network/a has 4 elements of torch.float32, but the index lists {listed}"
    with pytest.raises(DataError, match=f"rank-0-of-1.safetensors: {message}"):
        open_checkpoint(folder).read("network/a")
