"""Where a split's files come from: a folder here, or a remote place behind a local cache (remote.py)."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from .errors import ShardError
from .labels import LabelSet, list_labels, read_labels
from .manifest import Manifest, ShardInfo, read_manifest


class Store(Protocol):
    """Hands out a split's manifest, label sets and shards as local files."""

    root: str  # as the user wrote it, for messages

    def manifest(self) -> Manifest:
        """The split's manifest, checked."""

    def check(self, manifest: Manifest) -> None:
        """Are all shards there, as far as that can be seen at a glance? ShardError names those that are not."""

    def labels(self, manifest: Manifest, name: str) -> LabelSet:
        """A label set, checked."""

    def list_labels(self) -> list[str]:
        """Names of the label sets there are."""

    def folder_of(self, info: ShardInfo) -> Path:
        """A local folder that has the shard's tar and index now; waits until it does. Called from many threads.

        StoreError if it cannot be had.
        """

    def expect(self, coming: Iterable[ShardInfo]) -> None:
        """What `folder_of` will be asked for from now on, in that order; replaces earlier expectations."""

    def close(self) -> None:
        """Stop all work in the background."""


class LocalStore:
    """A folder on this machine, or one that looks like it (NFS, a mounted bucket)."""

    def __init__(self, folder: Path) -> None:
        self.root = str(folder)
        self.folder = folder

    def manifest(self) -> Manifest:
        """Read from the folder."""
        return read_manifest(self.folder)

    def check(self, manifest: Manifest) -> None:
        """Compare names and sizes with the manifest."""
        sizes = {entry.name: entry.stat().st_size for entry in os.scandir(self.folder) if entry.is_file()}
        wrong = [shard.name for shard in manifest.shards if sizes.get(shard.name) != shard.bytes]
        wrong += [shard.index_name for shard in manifest.shards if shard.index_name not in sizes]
        if wrong:
            raise ShardError(
                f"{self.folder}: missing or of the wrong size: {', '.join(wrong[:5])}"
                f"{f' and {len(wrong) - 5} more' if len(wrong) > 5 else ''}; copy them again, or run `sopdist verify`"
            )

    def labels(self, manifest: Manifest, name: str) -> LabelSet:
        """Read from the folder."""
        return read_labels(self.folder, manifest, name)

    def list_labels(self) -> list[str]:
        """Read from the folder."""
        return list_labels(self.folder)

    def folder_of(self, info: ShardInfo) -> Path:  # noqa: ARG002 - all shards are in one place
        """The folder itself."""
        return self.folder

    def expect(self, coming: Iterable[ShardInfo]) -> None:
        """Nothing to fetch."""

    def close(self) -> None:
        """Nothing to stop."""
