"""Checks of a split against its manifest: all shards, indices, samples and label sets, optionally decoding images."""

from __future__ import annotations

import itertools
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from ...files import PART_SUFFIX
from ..labels import FOLDER, GIVEN, Labels, read_labels
from ..manifest import MANIFEST, Manifest, ShardInfo, read_manifest
from .verify_shard import Checks, Findings, Problem, ShardCheck, index_of, printable, read_keys

_STARTED = "prepare.json"  # exists while `sopdist prepare` has not written the manifest
_SHARD_FILE = re.compile(r"shard-.*\.(?:tar|idx)")

Hashes = NDArray[np.int64]  # of keys: 112 MB for 14 million keys, which would take 2 GB as text


def find_splits(folder: Path) -> list[Path]:
    """The folder itself if it is a split, otherwise its subfolders that are complete or incomplete splits."""
    if _is_split(folder):
        return [folder]
    try:
        found = [child for child in sorted(folder.iterdir()) if child.is_dir() and _is_split(child)]
    except OSError:
        found = []
    if not found:
        read_manifest(folder)  # raises an error with the reason
    return found


def _is_split(folder: Path) -> bool:
    return (folder / MANIFEST).exists() or (folder / _STARTED).exists() or any(folder.glob("shard-*.tar"))


def verify_split(folder: Path, checks: Checks) -> tuple[Manifest | None, Findings]:
    """Check everything. The manifest is None if it cannot be read; nothing else can be checked then."""
    found = Findings(checks.max_kept)
    try:
        manifest = read_manifest(folder)
    except DataError as error:
        if (folder / _STARTED).exists() and not (folder / MANIFEST).exists():
            what = "`sopdist prepare` was interrupted; run it again to resume"
            found.add(Problem("incomplete", what, folder.name or str(folder)))
            return None, found
        found.add(Problem("manifest", str(error).removeprefix(f"{folder / MANIFEST}: "), MANIFEST))
        return None, found
    checks.on_start(manifest)
    _check_stray_files(folder, manifest, found)
    given = _check_label_sets(folder, manifest, found)
    stop = threading.Event()

    def check(info: ShardInfo) -> tuple[Findings, Hashes]:
        shard = ShardCheck(folder, info, manifest, given, checks, stop)
        return shard.found, _hashes(shard.run())

    hashes = []
    pool = ThreadPoolExecutor(checks.workers)
    try:
        for shard_found, shard_hashes in pool.map(check, manifest.shards):
            found.merge(shard_found)
            hashes.append(shard_hashes)
    finally:
        stop.set()  # after an interrupt, do not wait for shards that are being checked
        pool.shutdown(cancel_futures=True)
    _check_keys_are_unique(folder, manifest, hashes, checks, found)
    return manifest, found


def _check_stray_files(folder: Path, manifest: Manifest, found: Findings) -> None:
    expected = {name for info in manifest.shards for name in (info.name, info.index_name)}
    for path in sorted(itertools.chain(folder.iterdir(), (folder / FOLDER).glob("*"))):
        name = path.relative_to(folder).as_posix()
        if name.endswith(PART_SUFFIX):
            found.add(Problem("stray file", "left by an interrupted command; delete it", name))
        elif _SHARD_FILE.fullmatch(name) and name not in expected:
            found.add(Problem("stray file", "not in the manifest; delete it, or prepare the split again", name))


def _check_label_sets(folder: Path, manifest: Manifest, found: Findings) -> Labels | None:
    """Check all label sets; returns `given` if it is valid."""
    given = None
    paths = [path for path in (folder / FOLDER).glob("*") if path.suffix in (".npy", ".json")]
    for name in sorted({path.stem for path in paths} | {GIVEN}):
        try:
            for path in paths:
                if path.stem == name and not path.is_file():  # reading a pipe would block
                    raise DataError("not a regular file")
            labels = read_labels(folder, manifest, name).labels
        except DataError as error:
            file = f"{FOLDER}/{name}.npy"
            found.add(Problem("label set", str(error).removeprefix(f"{folder / file}: "), file))
        else:
            given = labels if name == GIVEN else given
    return given


def _hashes(keys: list[str]) -> Hashes:
    return np.fromiter(map(hash, keys), dtype=np.int64, count=len(keys))


def _check_keys_are_unique(
    folder: Path, manifest: Manifest, hashes: list[Hashes], checks: Checks, found: Findings
) -> None:
    """Samples with equal hashes are candidates; their keys are read again and compared."""
    everywhere = np.concatenate(hashes)
    order = np.argsort(everywhere, kind="stable")
    equal = np.flatnonzero(everywhere[order[1:]] == everywhere[order[:-1]])
    candidates = np.unique(order[np.concatenate((equal, equal + 1))])
    starts = np.cumsum([0, *map(len, hashes)])  # by the keys found in each shard, which may differ from the manifest
    shard_of = np.searchsorted(starts, candidates, side="right") - 1
    first_of: dict[str, tuple[int, int]] = {}
    for shard in np.unique(shard_of).tolist():
        info = manifest.shards[shard]
        keys = read_keys(folder, info, checks.quick)
        for position in (candidates[shard_of == shard] - starts[shard]).tolist():
            if position >= len(keys):
                continue  # the file was changed in the meantime
            first_shard, first_position = first_of.setdefault(keys[position], (shard, position))
            if (first_shard, first_position) != (shard, position):
                first = manifest.shards[first_shard]
                what = f"the same key as {first.name}, index {index_of(first, first_position)}"
                found.add(Problem("key", what, info.name, printable(keys[position]), index_of(info, position)))
