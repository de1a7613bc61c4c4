"""Tensor files: readable by the safetensors package, valid byte by byte, and never written partially."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from sopdist.checkpoint.tensor_file import DTYPES, read_tensors, regular_file_size, write_tensors
from sopdist.errors import DataError

SHAPES = [(), (0,), (1,), (5,), (0, 3), (3, 0, 2), (2, 3), (2, 3, 4, 5), (1, 1, 1, 1, 7)]


def random_bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> Tensor:
    """Any bits, including those of NaNs and subnormal numbers."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    count = torch.Size(shape).numel() * dtype.itemsize
    bits = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    return bits.view(dtype).view(shape)


def bits_of(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().flatten().clone().view(torch.uint8).numpy())


def same(one: Tensor, other: Tensor) -> bool:
    """Bitwise equality; NaN equals itself."""
    return one.dtype == other.dtype and one.shape == other.shape and bits_of(one) == bits_of(other)


def header_of(content: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def test_every_dtype_and_shape_round_trips_bit_for_bit_also_through_the_safetensors_package(tmp_path: Path) -> None:
    tensors = {
        f"{name} {shape}": random_bits(dtype, shape, seed)
        for seed, (name, dtype) in enumerate(DTYPES.items())
        for shape in SHAPES
    }
    written = write_tensors(tmp_path / "all", tensors)
    for found in (read_tensors(tmp_path / "all"), load_file(tmp_path / "all")):
        assert found.keys() == tensors.keys()
        assert all(same(found[name], tensors[name]) for name in tensors)
    content = (tmp_path / "all").read_bytes()
    assert (written.size, written.sha256) == (len(content), hashlib.sha256(content).hexdigest())


@given(st.lists(st.tuples(st.sampled_from(list(DTYPES)), st.lists(st.integers(0, 4), max_size=4)), max_size=8))
def test_the_layout_follows_the_format_and_every_tensor_is_aligned(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[tuple[str, list[int]]]
) -> None:
    tensors = {f"t{n}": random_bits(DTYPES[name], tuple(shape), n) for n, (name, shape) in enumerate(kinds)}
    path = tmp_path_factory.mktemp("layout") / "file"
    write_tensors(path, tensors)
    content = path.read_bytes()
    header, data = header_of(content)
    assert header.keys() == tensors.keys()
    at = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        start, end = entry["data_offsets"]
        tensor = tensors[name]
        assert start == at, "no gaps and no overlaps"
        assert (len(content) - len(data) + start) % tensor.dtype.itemsize == 0
        assert (DTYPES[entry["dtype"]], tuple(entry["shape"])) == (tensor.dtype, tuple(tensor.shape))
        assert data[start:end] == bits_of(tensor)
        at = end
    assert at == len(data)


def views() -> dict[str, Tensor]:
    """Tensors that are not contiguous in memory."""
    base = torch.arange(2.0 * 3 * 4 * 5).view(2, 3, 4, 5)
    return {
        "transposed": base.transpose(1, 3),
        "channels last": base.contiguous(memory_format=torch.channels_last),
        "one channel, last": base[:, :1].contiguous(memory_format=torch.channels_last),
        "every third": torch.arange(10)[1::3],
        "one of many": torch.arange(10)[1::9][:1],  # its stride is 9, but is_contiguous() is true
        "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
        "from the middle": base[1, 1:, 2],
        "with a gradient": torch.ones(3, requires_grad=True) * 2,
        "a scalar of many": torch.arange(10)[4],
    }


def test_tensors_are_written_in_element_order_whatever_their_memory_layout(tmp_path: Path) -> None:
    tensors = views()
    write_tensors(tmp_path / "views", tensors)
    found = load_file(tmp_path / "views")
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor), name


def test_names_may_be_any_text(tmp_path: Path) -> None:
    names = ["", "a/b", "../x", 'quo"te', "line\nbreak", "\u0000", "ü 漢", "x" * 3000]
    write_tensors(tmp_path / "names", {name: torch.tensor(float(n)) for n, name in enumerate(names)})
    assert {name: int(value) for name, value in load_file(tmp_path / "names").items()} == {
        name: number for number, name in enumerate(names)
    }


def test_large_tensors_are_written_in_full(tmp_path: Path) -> None:
    """Larger than one write."""
    tensor = torch.arange(3_000_001)
    written = write_tensors(tmp_path / "large", {"small": torch.ones(1, dtype=torch.bool), "large": tensor})
    assert torch.equal(load_file(tmp_path / "large")["large"], tensor)
    assert written.sha256 == hashlib.sha256((tmp_path / "large").read_bytes()).hexdigest()


def test_an_unsupported_dtype_is_named_and_the_old_file_is_kept(tmp_path: Path) -> None:
    write_tensors(tmp_path / "file", {"a": torch.ones(2)})
    before = (tmp_path / "file").read_bytes()
    with pytest.raises(TypeError, match=r"spectrum: tensors of type torch.complex64 cannot be saved"):
        write_tensors(tmp_path / "file", {"a": torch.ones(2), "spectrum": torch.ones(2, dtype=torch.complex64)})
    assert (tmp_path / "file").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    "content",
    [b"", b"\0" * 7, struct.pack("<Q", 2**62) + b"{}", struct.pack("<Q", 2) + b"[]", b"not a tensor file at all"],
)
def test_a_file_that_is_not_a_tensor_file_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(DataError, match=f"{tmp_path}/file: cannot be read"):
        read_tensors(tmp_path / "file")


def test_only_regular_files_have_a_size(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "folder").mkdir()
    assert regular_file_size(tmp_path / "file") == 5
    irregular = "is not a regular file"
    for name, reason in (("link", irregular), ("folder", irregular), ("none", "No such file")):
        with pytest.raises(DataError, match=f"{tmp_path}/{name}: .*{reason}"):
            regular_file_size(tmp_path / name)
