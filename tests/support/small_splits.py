"""Splits for tests, written sample by sample, so that tests can write samples that `sopdist prepare` never would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from sopdist.data.labels import write_labels
from sopdist.data.manifest import Manifest, shard_name
from sopdist.data.shards import Member, write_shard
from tests.support.pictures import encoded, picture

CLASSES = ("cat", "dog", "owl")


@cache
def jpeg(seed: int) -> bytes:
    return encoded(picture(seed, 40, 30))


def sample(index: int, **changes: Any) -> Member:
    """Sample `index` of an intact split: label `index % 3`, key `k/INDEX`."""
    record = {"label": index % len(CLASSES), "path": f"k/{index}.jpg"}
    return Member(f"k/{index}", "jpg", jpeg(index % 5), record)._replace(**changes)


def samples(count: int = 12) -> list[Member]:
    return [sample(index) for index in range(count)]


def write_split(
    folder: Path, members: Sequence[Member] | None = None, per_shard: int = 4, classes: tuple[str, ...] = CLASSES
) -> Manifest:
    """Write shards, manifest and label set `given`; by default, three shards of four samples."""
    members = samples() if members is None else members
    folder.mkdir(parents=True, exist_ok=True)
    shards = []
    for number, first in enumerate(range(0, len(members), per_shard)):
        info = write_shard(folder / shard_name(number), members[first : first + per_shard])
        shards.append(replace(info, first=first))
    manifest = Manifest("pets", folder.name, classes, tuple(shards))
    manifest.write(folder)
    given = np.array([index % len(classes) for index in range(len(members))])
    write_labels(folder, manifest, "given", given, {"kind": "test"})
    return manifest
