"""Read and write safetensors files. Unlike the safetensors package, this writes tensors one by one: there is no second
copy in memory, the checksum is computed along the way, and other threads keep running.

    8 bytes: header length, little endian | header: JSON, padded with spaces | the tensors, one after another
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import DataError
from ..files import atomic_file

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_CHUNK = 8 << 20


class Written(NamedTuple):
    """Size and checksum of a file that was written."""

    size: int  # bytes
    sha256: str


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> Written:
    """Write tensors to a file and flush it to disk. If that fails, an existing file is left unchanged."""
    digest = hashlib.sha256()
    with atomic_file(path) as file:
        for block in _blocks(tensors):
            for start in range(0, len(block), _CHUNK):
                chunk = block[start : start + _CHUNK]
                digest.update(chunk)
                file.write(chunk)
        size = file.tell()
    return Written(size, digest.hexdigest())


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read all tensors of any safetensors file."""
    with open_tensors(path) as file:
        return {name: file.get_tensor(name) for name in file.offset_keys()}


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """Open a file with the safetensors package; DataError if that fails."""
    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None


def regular_file_size(path: Path) -> int:
    """Size of a file in bytes; DataError unless it is a regular file (links, pipes and devices are refused)."""
    try:
        found = path.lstat()
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not stat.S_ISREG(found.st_mode):
        raise DataError(f"{path}: is not a regular file")
    return found.st_size


def _blocks(tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    """The content of the file, in order. The widest dtypes come first, so that every tensor is aligned to its dtype.

    Contiguous CPU tensors are not copied; of the others, one copy exists at a time.
    """
    in_order = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    header: dict[str, object] = {}
    at = 0
    for name, tensor in in_order:
        if tensor.dtype not in NAMES:
            raise TypeError(f"{name}: tensors of type {tensor.dtype} cannot be saved")
        end = at + tensor.numel() * tensor.dtype.itemsize
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for _, tensor in in_order:
        yield _bytes_of(tensor)


def _bytes_of(tensor: Tensor) -> memoryview:
    contiguous = tensor.detach().cpu().contiguous()
    # Not reshape: a single element sliced from a larger tensor keeps its stride, which view(torch.uint8) refuses.
    return contiguous.as_strided((contiguous.numel(),), (1,)).view(torch.uint8).numpy().data
