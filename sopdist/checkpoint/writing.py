"""Write a checkpoint with torch.distributed.checkpoint: it collects which rank holds which fragments, lets all ranks
write in parallel, in the background if asked, and reports success or failure to every rank. The file format is our own:
safetensors and JSON, with checksums and a marker that is written last. Nothing is pickled.

A save on two ranks:   plan (which rank holds which fragments) -> rank-0-of-2 and rank-1-of-2 in parallel
                       -> rank 0: index, then marker
"""

# ruff: noqa: ARG002, ARG003 -- torch defines the interfaces

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future as HostFuture
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import Metadata, StorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ..files import sync_folder
from .folder import remove
from .fragments import Fragment
from .index import FORMAT, FileInfo, FragmentLocation, Index, TensorInfo, commit, file_of
from .tensor_file import write_tensors

# Expected on a single rank. The filter is global because background saves run in other threads.
warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)

# All fragments are one entry of the state dict: torch logs per entry, which would block training for longer.
_FRAGMENTS = "fragments"


def _nothing() -> None:
    pass


class Staging(AsyncStager):
    """Copies fragments to CPU buffers that are reused. Training may change the originals once `stage` has returned."""

    should_synchronize_after_execute = False

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def stage(self, state_dict: Mapping[str, Mapping[str, Fragment]]) -> dict[str, dict[str, Fragment]]:
        """Copy the fragments to the CPU. The next call overwrites the copies."""
        fragments = state_dict[_FRAGMENTS]
        staged = {name: self._copy(name, fragment) for name, fragment in fragments.items()}
        if any(fragment.values.is_cuda for fragment in fragments.values()):
            torch.cuda.synchronize()
        return {_FRAGMENTS: staged}

    def _copy(self, name: str, fragment: Fragment) -> Fragment:
        values = fragment.values
        held = self._held.get(name)
        if held is None or held.shape != values.shape or held.dtype != values.dtype:
            # Keep the memory format of the original (e.g. channels last). Converting it would take twice as long; that
            # is done later, in the background.
            held = torch.empty_like(values, device="cpu", pin_memory=values.is_cuda)
            self._held[name] = held
        held.copy_(values, non_blocking=values.is_cuda)
        return Fragment(held, fragment.start, fragment.shape)

    def synchronize_staging(self) -> None:
        """Does nothing: staging is complete when `stage` returns."""

    def close(self) -> None:
        """Does nothing."""


class FragmentPlanner(SavePlanner):
    """Plans a save from fragments. All tensors are treated as flat, so that a fragment is an interval of elements."""

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Remember the fragments of this rank."""
        self._fragments: Mapping[str, Fragment] = state_dict[_FRAGMENTS]

    def create_local_plan(self) -> SavePlan:
        """One write item per fragment."""
        return SavePlan([_write_item(name, fragment) for name, fragment in self._fragments.items()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Returns the plans unchanged: ranks write what they hold. The index is built from the write results."""
        return all_plans, Metadata({})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Returns the plan unchanged."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """The values of a fragment."""
        return self._fragments[write_item.index.fqn].values

    def fragment(self, name: str) -> Fragment:
        """The fragment of a tensor that this rank holds."""
        return self._fragments[name]


class CheckpointWriter(StorageWriter):
    """Writes one checkpoint: each rank writes its own file, rank 0 also writes the index and the marker."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        ranks: int,
        about: Mapping[str, Any],
        *,
        before: Callable[[], None] = _nothing,
        after: Callable[[], None] = _nothing,
    ) -> None:
        """`about` is the metadata for the index. Rank 0 calls `before` just before the commit and `after` after it."""
        self._folder, self._file = folder, file_of(rank, ranks)
        self._about, self._before, self._after = dict(about), before, after

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Does nothing: a writer serves one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Create an empty folder before any rank writes."""
        if is_coordinator:
            remove(self._folder)
            self._folder.mkdir(parents=True)
            for folder in (self._folder.parent, self._folder.parent.parent):
                sync_folder(folder)  # the folder entries must be on disk before the marker is

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Returns the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Returns the plans unchanged."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the file of this rank, or no file if there is nothing to write."""
        assert isinstance(planner, FragmentPlanner)
        done: Future[list[WriteResult]] = Future()
        if not plan.items:
            done.set_result([])
            return done
        fragments = {item.index.fqn: planner.fragment(item.index.fqn) for item in plan.items}
        tensors = {name: fragment.values for name, fragment in fragments.items()}
        written = write_tensors(self._folder / self._file, tensors)
        file = FileInfo(written.size, written.sha256)
        results = [_result(item.index, fragments[item.index.fqn], self._file, file) for item in plan.items]
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the checkpoint after every rank has written its file."""
        files: dict[str, FileInfo] = {}
        locations: dict[str, list[FragmentLocation]] = {}
        kinds: dict[str, set[tuple[torch.dtype, tuple[int, ...]]]] = {}
        for result in (result for rank_results in results for result in rank_results):
            location, info, *kind = result.storage_data
            files[location.file] = info
            locations.setdefault(location.name, []).append(location)
            kinds.setdefault(location.name, set()).add(tuple(kind))
        tensors = {name: _join(name, kinds[name], fragments) for name, fragments in locations.items()}
        self._before()
        commit(self._folder, Index(FORMAT, self._about, tensors, files))
        self._after()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Does not check: the folder is known already."""
        return True


def save_fragments(fragments: Mapping[str, Fragment], writer: CheckpointWriter, group: ProcessGroup | None) -> None:
    """Write a checkpoint synchronously. Collective over the group."""
    planner, alone = FragmentPlanner(), group is None
    dcp.save({_FRAGMENTS: fragments}, storage_writer=writer, planner=planner, process_group=group, no_dist=alone)


def start_save(
    fragments: Mapping[str, Fragment], writer: CheckpointWriter, group: ProcessGroup | None, staging: Staging
) -> HostFuture[Any]:
    """Copy the fragments, then write the checkpoint in the background. Collective; nothing else may use the group."""
    started = dcp.async_save(
        {_FRAGMENTS: fragments},
        storage_writer=writer,
        planner=FragmentPlanner(),
        process_group=group,
        async_stager=staging,
        no_dist=group is None,
    )
    assert isinstance(started, HostFuture)
    return started


def _write_item(name: str, fragment: Fragment) -> WriteItem:
    start, count = torch.Size([fragment.start]), torch.Size([fragment.values.numel()])
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(offsets=start, sizes=count),
        properties=TensorProperties(dtype=fragment.values.dtype),
        size=torch.Size([fragment.elements]),
    )
    return WriteItem(index=MetadataIndex(name, start), type=WriteItemType.SHARD, tensor_data=data)


def _result(index: MetadataIndex, fragment: Fragment, file: str, info: FileInfo) -> WriteResult:
    location = FragmentLocation(file, index.fqn, fragment.start, fragment.start + fragment.values.numel())
    return WriteResult(index, info.bytes, (location, info, fragment.values.dtype, fragment.shape))


def _join(name: str, kinds: set[tuple[torch.dtype, tuple[int, ...]]], fragments: list[FragmentLocation]) -> TensorInfo:
    """Join the fragments of all ranks. They must cover the tensor exactly and agree on its dtype and shape."""
    in_order = sorted(fragments, key=lambda fragment: (fragment.start, fragment.stop))
    ends = [0, *(fragment.stop for fragment in in_order)]
    dtype, shape = min(kinds, key=str)
    if len(kinds) > 1 or [fragment.start for fragment in in_order] != ends[:-1] or ends[-1] != math.prod(shape):
        raise RuntimeError(f"{name}: the fragments of the ranks do not form the full tensor")
    return TensorInfo(dtype, shape, tuple(in_order))
