"""The index of a checkpoint round-trips, and a bad one is refused with a reason."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sopdist.checkpoint.index import FORMAT, FileInfo, FragmentLocation, Index, TensorInfo, commit, file_of, read_index
from sopdist.checkpoint.tensor_file import DTYPES
from sopdist.errors import DataError
from tests.support.checkpoints import about, put_index, rewrite_index, write

TEXT = st.text(max_size=12)


@st.composite
def indexes(draw: st.DrawFn) -> Index:
    """Indices for one to three ranks, with tensors in any number of fragments, some of them empty."""
    ranks = draw(st.integers(1, 3))
    tensors = {}
    held = dict.fromkeys(range(ranks), 0)
    for name in draw(st.lists(TEXT, max_size=4, unique=True)):
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
        dtype = draw(st.sampled_from(list(DTYPES.values())))
        full = TensorInfo(dtype, shape, ())
        ends = [0, *sorted(draw(st.lists(st.integers(0, full.elements), max_size=3))), full.elements]
        fragments = []
        for start, stop in pairwise(ends):
            rank = draw(st.integers(0, ranks - 1))
            fragments.append(FragmentLocation(file_of(rank, ranks), name, start, stop))
            held[rank] += (stop - start) * dtype.itemsize
        tensors[name] = TensorInfo(dtype, shape, tuple(fragments))
    files = {file_of(rank, ranks): FileInfo(held[rank] + draw(st.integers(0, 9)), "0" * 64) for rank in range(ranks)}
    config = draw(st.dictionaries(TEXT, st.one_of(st.none(), TEXT, st.floats(allow_nan=False, allow_infinity=False))))
    return Index(FORMAT, about(draw(st.integers(0, 2**40)), ranks) | {"config": config}, tensors, files)


@given(indexes())
def test_an_index_round_trips(tmp_path_factory: pytest.TempPathFactory, index: Index) -> None:
    folder = tmp_path_factory.mktemp("index")
    commit(folder, index)
    assert read_index(folder) == index
    assert {path.name for path in folder.iterdir()} == {"checkpoint.json", "complete"}


def test_the_marker_is_written_last(tmp_path: Path) -> None:
    """If the marker cannot be written, the index exists but the checkpoint is not complete."""
    (tmp_path / "complete").mkdir()
    with pytest.raises(OSError, match="directory"):
        commit(tmp_path, Index(FORMAT, about(1, 1)))
    assert (tmp_path / "checkpoint.json").is_file()
    with pytest.raises(DataError, match="complete"):
        read_index(tmp_path)


@pytest.mark.parametrize("name", ["checkpoint.json", "complete"])
def test_a_checkpoint_without_index_or_marker_is_not_complete(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path / "step")
    (folder / name).unlink()
    with pytest.raises(DataError, match=f"{folder}: is not a complete checkpoint: No such file or directory: .*{name}"):
        read_index(folder)


def test_a_later_format_names_the_version_that_wrote_it(tmp_path: Path) -> None:
    folder = write(tmp_path / "step")
    rewrite_index(folder, lambda tree: tree.update(format=4, versions={"sopdist": "9.9"}))
    with pytest.raises(DataError, match=r"has format 4, this sopdist .* reads up to 3; .* that wrote it: 9\.9"):
        read_index(folder)


def test_unknown_keys_of_a_later_version_are_kept(tmp_path: Path) -> None:
    folder = write(tmp_path / "step")
    rewrite_index(folder, lambda tree: tree.update(more={"a": 1}))
    assert read_index(folder).about["more"] == {"a": 1}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"[]",
        b"7",
        b'"text"',
        b"{",
        b"\xff\xfe",
        b"{}",
        b'{"format": 2}',
        b'{"format": 3}',
        b'{"format": null}',
    ],
)
def test_a_file_that_is_not_an_index_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    folder = write(tmp_path / "step")
    put_index(folder, content)
    with pytest.raises(DataError, match=str(folder)):
        read_index(folder)


def test_the_index_is_plain_json(tmp_path: Path) -> None:
    tree = json.loads((write(tmp_path / "step") / "checkpoint.json").read_text())
    entry = tree["tensors"]["network/layer.weight"]
    assert entry == {"dtype": "F32", "shape": [4, 3, 2, 2], "pieces": [["rank-0-of-1.safetensors", 0, 48]]}
    assert tree["files"].keys() == {"rank-0-of-1.safetensors"}


def test_elements_and_bytes_count_the_full_tensor() -> None:
    info = TensorInfo(torch.float64, (3, 4), ())
    assert (info.elements, info.bytes) == (12, 96)
    assert TensorInfo(torch.bool, (), ()).bytes == 1
