"""Checkpoints of format 1, which sopdist 0.1 wrote before ranks wrote in parallel, read as if in the current format.

network.safetensors  optimizer.safetensors    full tensors by name
noise-0-of-2.safetensors ...                  each rank's rows of the noise table
state.json                                    step, best so far, and the fingerprint of the run
"""

from __future__ import annotations

import math
import re
from pathlib import Path

from ..errors import DataError
from . import names
from .index import INDEX, FileInfo, FragmentLocation, Index, TensorInfo, check_about, parse, read_small
from .tensor_file import DTYPES, open_tensors, regular_file_size

STATE = "state.json"
_NOISE = re.compile(r"noise-([0-9]{1,6})-of-([0-9]{1,6})\.safetensors")


def is_old(folder: Path) -> bool:
    """Whether a folder holds a checkpoint of format 1. It got its name when it was complete."""
    return (folder / STATE).is_file() and not (folder / INDEX).exists()


def read_old_index(folder: Path) -> Index:
    """The contents of a checkpoint of format 1. It has no checksums."""
    try:
        state = parse(read_small(folder / STATE))
        number = state["format"]
        if number != 1:
            raise DataError(f"{folder}: has format {number}, and {STATE} belongs to format 1")
        about = {key: state[key] for key in ("step", "best", "ranks", "fingerprint")}
        about["versions"] = {name: state[name] for name in ("sopdist", "torch") if name in state}
        about |= {"engine": "", "config": {}}
        check_about(about)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise DataError(f"{folder / STATE}: cannot be read: {error}") from None
    index = Index(1, about)
    prefixes = {"network.safetensors": "network/", "optimizer.safetensors": "optimizer/"}
    for path in sorted(folder.iterdir()):
        noise = _NOISE.fullmatch(path.name)
        prefix = names.table("noise", int(noise[1])) if noise else prefixes.get(path.name)
        if noise and path.name != f"noise-{int(noise[1])}-of-{about['ranks']}.safetensors":
            raise DataError(f"{path}: is not of a checkpoint of {about['ranks']} ranks")
        if prefix is not None:
            index.files[path.name] = FileInfo(regular_file_size(path), None)
            index.tensors.update(_tensors(path, prefix))
    missing = prefixes.keys() - index.files.keys()
    if missing:
        raise DataError(f"{folder}: has no {' and no '.join(sorted(missing))}")
    return index


def _tensors(path: Path, prefix: str) -> dict[str, TensorInfo]:
    found = {}
    with open_tensors(path) as file:
        for name in file.offset_keys():
            part = file.get_slice(name)
            shape, dtype = tuple(part.get_shape()), part.get_dtype()
            if dtype not in DTYPES:
                raise DataError(f"{path}: {name} is of type {dtype}, which no checkpoint has")
            found[prefix + name] = TensorInfo(
                DTYPES[dtype], shape, (FragmentLocation(path.name, name, 0, math.prod(shape)),)
            )
    return found
