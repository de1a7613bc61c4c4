"""Tensors by name in one file of the safetensors format, written tensor by tensor: no second copy in memory, a checksum
on the way, and other threads go on meanwhile.

    8 bytes: length of the header, little endian | the header, JSON, filled up with blanks | the tensors, one by one
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

from ..data.errors import DataError
from ..files import whole_file

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_CHUNK = 8 << 20


class Written(NamedTuple):
    """What is now in a file."""

    size: int  # bytes
    sha256: str


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> Written:
    """Write them in full, down to the disk; an older file of that name stays as it is if that fails."""
    digest = hashlib.sha256()
    with whole_file(path) as file:
        for block in _blocks(tensors):
            for start in range(0, len(block), _CHUNK):
                chunk = block[start : start + _CHUNK]
                digest.update(chunk)
                file.write(chunk)
        size = file.tell()
    return Written(size, digest.hexdigest())


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a file, whoever wrote it."""
    with open_tensors(path) as file:
        return {name: file.get_tensor(name) for name in file.offset_keys()}


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """The file as the safetensors package has it; DataError for what it finds wrong with it."""
    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None


def plain_size(path: Path) -> int:
    """The bytes of a file; DataError if it is none, or leads elsewhere, or is one that reading would wait for."""
    try:
        found = path.lstat()
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not stat.S_ISREG(found.st_mode):
        raise DataError(f"{path}: is not a plain file")
    return found.st_size


def _blocks(tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    """The content of the file, in order: the widest numbers first, so that all lie where their width divides.

    Tensors that lie on the CPU in one piece are not copied, and of others there is one copy at a time.
    """
    in_order = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    header: dict[str, object] = {}
    at = 0
    for name, tensor in in_order:
        if tensor.dtype not in NAMES:
            raise TypeError(f"{name}: numbers of type {tensor.dtype} cannot be saved")
        end = at + tensor.numel() * tensor.dtype.itemsize
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for _, tensor in in_order:
        yield _bytes_of(tensor)


def _bytes_of(tensor: Tensor) -> memoryview:
    plain = tensor.detach().cpu().contiguous()
    # Not reshape: one element out of many keeps their stride, and would look as if there were gaps.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().data
