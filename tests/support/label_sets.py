"""Label sets of a small split, created with the command line."""

from __future__ import annotations

from pathlib import Path

from sopdist.cli import main
from sopdist.data.labels import read_labels
from sopdist.data.manifest import read_manifest

GIVEN = [index % 3 for index in range(12)]


def labels(folder: Path, name: str) -> list[int]:
    return read_labels(folder, read_manifest(folder), name).labels.tolist()


def recipe(folder: Path, name: str) -> dict[str, object]:
    return read_labels(folder, read_manifest(folder), name).recipe


def add(folder: Path, name: str, content: str | bytes, *options: str) -> int:
    """Run `sopdist labels add` with a file of this name and content."""
    path = folder.parent / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return main(["labels", "add", str(folder), "new", "--from", str(path), *options])


def noise(folder: Path, *options: str) -> int:
    return main(["labels", "noise", str(folder), *options])
