"""Access to the files of a split: in a local folder, or in remote storage behind a local cache (remote/)."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from ..errors import ShardError
from .labels import LabelSet, list_labels, read_labels
from .manifest import Manifest, ShardInfo, read_manifest


class Store(Protocol):
    """Provides a split's manifest, label sets and shards as local files."""

    root: str  # as given by the user, for messages

    def manifest(self) -> Manifest:
        """Read and check the manifest."""

    def check(self, manifest: Manifest) -> None:
        """Check cheaply that all shards exist; raises ShardError with the names of missing ones."""

    def labels(self, manifest: Manifest, name: str) -> LabelSet:
        """Read and check a label set."""

    def list_labels(self) -> list[str]:
        """Names of the label sets."""

    def folder_of(self, info: ShardInfo) -> Path:
        """Wait until the shard's tar and index are local, and return their folder. Thread-safe.

        Raises StoreError if the shard cannot be fetched.
        """

    def expect(self, coming: Iterable[ShardInfo]) -> None:
        """Announce the shards that will be requested from `folder_of` next, in order; replaces earlier calls."""

    def close(self) -> None:
        """Stop all background work."""


class LocalStore:
    """A local folder, or one that is mounted (NFS, a bucket)."""

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

    def folder_of(self, info: ShardInfo) -> Path:  # noqa: ARG002 - all shards are in one folder
        """The folder itself."""
        return self.folder

    def expect(self, coming: Iterable[ShardInfo]) -> None:
        """Nothing to fetch."""

    def close(self) -> None:
        """Nothing to stop."""
