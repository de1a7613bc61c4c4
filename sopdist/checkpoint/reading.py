"""Read tensors of a checkpoint with torch.distributed.checkpoint, which joins the fragments of each tensor.

The files are safetensors; nothing is unpickled.
"""

# ruff: noqa: ARG002, ARG003 -- torch defines the interfaces

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

from ..errors import DataError
from .index import FragmentLocation, Index, TensorInfo
from .tensor_file import open_tensors, regular_file_size


class CheckpointReader(StorageReader):
    """Reads the given tensors of a checkpoint. Listing only those keeps planning fast for large checkpoints."""

    def __init__(self, folder: Path, tensors: dict[str, TensorInfo]) -> None:
        self._folder, self._tensors = folder, tensors

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Does nothing: a reader serves one checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index in the form that torch.distributed.checkpoint expects."""
        return Metadata({name: _metadata(info) for name, info in self._tensors.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Does nothing."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Returns the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Returns the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the requested fragments, file by file."""
        by_file: dict[str, list[tuple[FragmentLocation, Any]]] = {}
        for item in plan.items:
            offset = item.storage_index.offset
            assert offset is not None
            fragments = self._tensors[item.storage_index.fqn].fragments
            location = fragments[bisect_right(fragments, offset[0], key=lambda fragment: fragment.start) - 1]
            by_file.setdefault(location.file, []).append((location, item))
        for name, wanted in by_file.items():
            with open_tensors(self._folder / name) as file:
                for location, item in wanted:
                    values, target = file.get_tensor(location.name).flatten(), planner.resolve_tensor(item)
                    if len(values) != location.stop - location.start or values.dtype != target.dtype:
                        raise DataError(
                            f"{self._folder / name}: {location.name} has {len(values)} elements of {values.dtype}, "
                            f"but the index lists {location.stop - location.start} of {target.dtype}"
                        )
                    start = item.storage_offsets[0]
                    target.copy_(values[start : start + item.lengths[0]])
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Does not check: the folder is known already."""
        return True


def load_flat(folder: Path, index: Index, names: list[str]) -> dict[str, Tensor]:
    """Load tensors of a checkpoint, flattened. Not collective."""
    wanted = {name: index.tensors[name] for name in names}
    check_sizes(folder, index, {fragment.file for info in wanted.values() for fragment in info.fragments})
    try:
        flat = {name: torch.empty(info.elements, dtype=info.dtype) for name, info in wanted.items()}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.load(flat, storage_reader=CheckpointReader(folder, wanted), no_dist=True)
    except (dcp.CheckpointException, OSError, RuntimeError, MemoryError, DataError) as error:
        raise DataError(f"{folder}: cannot be read: {reason_of(error)}") from None
    return flat


def check_sizes(folder: Path, index: Index, names: Iterable[str]) -> None:
    """Check that files have the listed sizes, before memory is allocated for their tensors."""
    for name in names:
        size, listed = regular_file_size(folder / name), index.files[name].bytes
        if size != listed:
            raise DataError(f"{folder / name}: is damaged: it has {size} bytes, but {listed} were written")


def reason_of(error: BaseException) -> str:
    """The error of the lowest rank that failed, without tracebacks."""
    if not isinstance(error, dcp.CheckpointException) or not error.failures:
        return str(error)
    rank = min(error.failures)
    cause = error.failures[rank][0]
    return f"rank {rank}: {cause}" if rank else str(cause)


def _metadata(info: TensorInfo) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(torch.Size([fragment.start]), torch.Size([fragment.stop - fragment.start]))
        for fragment in info.fragments
        if fragment.stop > fragment.start
    ]
    return TensorStorageMetadata(TensorProperties(dtype=info.dtype), torch.Size([info.elements]), chunks)
