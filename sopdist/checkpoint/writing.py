"""How a checkpoint is written by torch.distributed.checkpoint: it gathers who has what, lets all ranks write at once,
in the background if wanted, and tells all of them whether that went well. The files are ours: safetensors and JSON,
with checksums, and a marker that comes last. Nothing is pickled into them.

A save, two ranks:   plan (who has which pieces) -> rank-0-of-2, rank-1-of-2 at once -> rank 0: index, marker
"""

# ruff: noqa: ARG002, ARG003 -- the interfaces are torch's

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
from .index import FORMAT, FileInfo, Index, Place, TensorInfo, commit, file_of
from .pieces import Piece
from .tensor_file import write_tensors

# Of one rank alone it is no news, and where saves run in the background no narrower place would do.
warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)


_PIECES = "pieces"  # all of them as one entry: torch logs something for each entry, while training stands still


def _nothing() -> None:
    pass


class Staging(AsyncStager):
    """Copies of pieces in memory that stays: training may change the originals as soon as they are made."""

    should_synchronize_after_execute = False

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def stage(self, state_dict: Mapping[str, Mapping[str, Piece]]) -> dict[str, dict[str, Piece]]:
        """Copy them to the CPU. One at a time: the copies of a save are overwritten by the next."""
        pieces = state_dict[_PIECES]
        staged = {name: self._copy(name, piece) for name, piece in pieces.items()}
        if any(piece.values.is_cuda for piece in pieces.values()):
            torch.cuda.synchronize()
        return {_PIECES: staged}

    def _copy(self, name: str, piece: Piece) -> Piece:
        values = piece.values
        held = self._held.get(name)
        if held is None or held.shape != values.shape or held.dtype != values.dtype:
            # In the order in memory that the original has (channels last): to change it takes twice as long, and can
            # wait until training goes on.
            held = torch.empty_like(values, device="cpu", pin_memory=values.is_cuda)
            self._held[name] = held
        held.copy_(values, non_blocking=values.is_cuda)
        return Piece(held, piece.start, piece.shape)

    def synchronize_staging(self) -> None:
        """Staging is over when `stage` returns."""

    def close(self) -> None:
        """There is nothing to close."""


class PiecePlanner(SavePlanner):
    """Tells torch.distributed.checkpoint who has which pieces. All tensors are seen flat: pieces are intervals."""

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """The pieces of this rank."""
        self._pieces: Mapping[str, Piece] = state_dict[_PIECES]

    def create_local_plan(self) -> SavePlan:
        """One item for each piece."""
        return SavePlan([_write_item(name, piece) for name, piece in self._pieces.items()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Nothing is decided here: ranks already have their shares. What was written tells all for the index."""
        return all_plans, Metadata({})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """As it is."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """The values of a piece."""
        return self._pieces[write_item.index.fqn].values

    def piece(self, name: str) -> Piece:
        """What this rank has of a tensor."""
        return self._pieces[name]


class CheckpointWriter(StorageWriter):
    """Writes one checkpoint: every rank its file, the first rank the index and the marker."""

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
        """`about` is for the index; the first rank calls `before` just before it commits, and `after` when it has."""
        self._folder, self._file = folder, file_of(rank, ranks)
        self._about, self._before, self._after = dict(about), before, after

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """One writer, one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """An empty folder, before any rank writes."""
        if is_coordinator:
            remove(self._folder)
            self._folder.mkdir(parents=True)
            for folder in (self._folder.parent, self._folder.parent.parent):
                sync_folder(folder)  # the names, too, must be on the disk before the marker says so

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file; none if it has nothing to write."""
        assert isinstance(planner, PiecePlanner)
        done: Future[list[WriteResult]] = Future()
        if not plan.items:
            done.set_result([])
            return done
        pieces = {item.index.fqn: planner.piece(item.index.fqn) for item in plan.items}
        written = write_tensors(self._folder / self._file, {name: piece.values for name, piece in pieces.items()})
        file = FileInfo(written.size, written.sha256)
        results = [_result(item.index, pieces[item.index.fqn], self._file, file) for item in plan.items]
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Every rank has written: commit."""
        files: dict[str, FileInfo] = {}
        places: dict[str, list[Place]] = {}
        kinds: dict[str, set[tuple[torch.dtype, tuple[int, ...]]]] = {}
        for result in (result for of_rank in results for result in of_rank):
            place, info, *kind = result.storage_data
            files[place.file] = info
            places.setdefault(place.name, []).append(place)
            kinds.setdefault(place.name, set()).add(tuple(kind))
        tensors = {name: _joined(name, kinds[name], pieces) for name, pieces in places.items()}
        self._before()
        commit(self._folder, Index(FORMAT, self._about, tensors, files))
        self._after()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """The folder is known already."""
        return True


def save_pieces(pieces: Mapping[str, Piece], writer: CheckpointWriter, group: ProcessGroup | None) -> None:
    """Write a checkpoint now. Collective over the group."""
    planner, alone = PiecePlanner(), group is None
    dcp.save({_PIECES: pieces}, storage_writer=writer, planner=planner, process_group=group, no_dist=alone)


def begin_save(
    pieces: Mapping[str, Piece], writer: CheckpointWriter, group: ProcessGroup | None, staging: Staging
) -> HostFuture[Any]:
    """Copy the pieces, and write the checkpoint in the background. Collective over the group, which is its own."""
    begun = dcp.async_save(
        {_PIECES: pieces},
        storage_writer=writer,
        planner=PiecePlanner(),
        process_group=group,
        async_stager=staging,
        no_dist=group is None,
    )
    assert isinstance(begun, HostFuture)
    return begun


def _write_item(name: str, piece: Piece) -> WriteItem:
    start, count = torch.Size([piece.start]), torch.Size([piece.values.numel()])
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(offsets=start, sizes=count),
        properties=TensorProperties(dtype=piece.values.dtype),
        size=torch.Size([piece.elements]),
    )
    return WriteItem(index=MetadataIndex(name, start), type=WriteItemType.SHARD, tensor_data=data)


def _result(index: MetadataIndex, piece: Piece, file: str, about_file: FileInfo) -> WriteResult:
    place = Place(file, index.fqn, piece.start, piece.start + piece.values.numel())
    return WriteResult(index, about_file.bytes, (place, about_file, piece.values.dtype, piece.shape))


def _joined(name: str, kinds: set[tuple[torch.dtype, tuple[int, ...]]], places: list[Place]) -> TensorInfo:
    """A tensor of all ranks' pieces: what does not fit together must not be called complete."""
    in_order = sorted(places, key=lambda place: (place.start, place.stop))
    ends = [0, *(place.stop for place in in_order)]
    dtype, shape = min(kinds, key=str)
    if len(kinds) > 1 or [place.start for place in in_order] != ends[:-1] or ends[-1] != math.prod(shape):
        raise RuntimeError(f"{name}: the ranks' pieces are not the whole tensor")
    return TensorInfo(dtype, shape, tuple(in_order))
