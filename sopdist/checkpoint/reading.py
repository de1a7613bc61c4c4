"""How tensors of a checkpoint are read by torch.distributed.checkpoint: it finds the pieces that a tensor consists of,
and puts them together. Files are safetensors, and nothing is unpickled.
"""

# ruff: noqa: ARG002, ARG003 -- the interfaces are torch's

from __future__ import annotations

import os
import warnings
from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import Metadata, StorageReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from ..data.errors import DataError
from .index import Index, Place, TensorInfo
from .tensor_file import open_tensors, plain_size


class CheckpointReader(StorageReader):
    """Reads some tensors of a checkpoint whose index is known. Of a large one, to list all would take longer."""

    def __init__(self, folder: Path, tensors: dict[str, TensorInfo]) -> None:
        self._folder, self._tensors = folder, tensors

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """One reader, one checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index, as torch.distributed.checkpoint has it."""
        return Metadata({name: _metadata(info) for name, info in self._tensors.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read file by file."""
        by_file: dict[str, list[tuple[Place, Any]]] = {}
        for item in plan.items:
            offset = item.storage_index.offset
            assert offset is not None
            pieces = self._tensors[item.storage_index.fqn].pieces
            place = pieces[bisect_right(pieces, offset[0], key=lambda piece: piece.start) - 1]
            by_file.setdefault(place.file, []).append((place, item))
        for name, wanted in by_file.items():
            with open_tensors(self._folder / name) as file:
                for place, item in wanted:
                    values, into = file.get_tensor(place.name).flatten(), planner.resolve_tensor(item)
                    if len(values) != place.stop - place.start or values.dtype != into.dtype:
                        raise DataError(
                            f"{self._folder / name}: {place.name} is {len(values)} numbers of {values.dtype}, "
                            f"{place.stop - place.start} of {into.dtype} are listed"
                        )
                    begin = item.storage_offsets[0]
                    into.copy_(values[begin : begin + item.lengths[0]])
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Folders only."""
        return True


def load_flat(folder: Path, index: Index, names: list[str]) -> dict[str, Tensor]:
    """Tensors of a checkpoint, flat. Every rank for itself."""
    wanted = {name: index.tensors[name] for name in names}
    check_sizes(folder, index, {piece.file for info in wanted.values() for piece in info.pieces})
    try:
        flat = {name: torch.empty(info.elements, dtype=info.dtype) for name, info in wanted.items()}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.load(flat, storage_reader=CheckpointReader(folder, wanted), no_dist=True)
    except (dcp.CheckpointException, OSError, RuntimeError, MemoryError, DataError) as error:
        raise DataError(f"{folder}: cannot be read: {reason_of(error)}") from None
    return flat


def check_sizes(folder: Path, index: Index, names: Iterable[str]) -> None:
    """Whether files are as large as listed: before memory is taken for what they are said to hold."""
    for name in names:
        size, listed = plain_size(folder / name), index.files[name].bytes
        if size != listed:
            raise DataError(f"{folder / name}: is damaged: it has {size} bytes, and had {listed} when it was written")


def reason_of(error: BaseException) -> str:
    """What went wrong, of the lowest rank that failed; without the tracebacks that come with it."""
    if not isinstance(error, dcp.CheckpointException) or not error.failures:
        return str(error)
    rank = min(error.failures)
    cause = error.failures[rank][0]
    return f"rank {rank}: {cause}" if rank else str(cause)


def _metadata(info: TensorInfo) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(torch.Size([piece.start]), torch.Size([piece.stop - piece.start]))
        for piece in info.pieces
        if piece.stop > piece.start
    ]
    return TensorStorageMetadata(TensorProperties(dtype=info.dtype), torch.Size([info.elements]), chunks)
