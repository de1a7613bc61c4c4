"""Is a split what its manifest says? Every shard, index, sample and label set, down to the pixels if asked."""

from __future__ import annotations

import itertools
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...files import PART_SUFFIX
from ..errors import DataError
from ..labels import FOLDER, GIVEN, Labels, read_labels
from ..manifest import MANIFEST, Manifest, ShardInfo, read_manifest
from .verify_shard import Checks, Findings, Problem, ShardCheck, index_of, read_keys, shown

_BEGUN = "prepare.json"  # what `sopdist prepare` keeps in a split until it has written the manifest
_SHARD_FILE = re.compile(r"shard-.*\.(?:tar|idx)")

Hashes = NDArray[np.int64]  # of keys: 14 million keys are 112 MB, as text they would be 2 GB


def find_splits(folder: Path) -> list[Path]:
    """The folder itself if it is a split, otherwise those of its folders that are, or were to become, one."""
    if _is_split(folder):
        return [folder]
    try:
        found = [child for child in sorted(folder.iterdir()) if child.is_dir() and _is_split(child)]
    except OSError:
        found = []
    if not found:
        read_manifest(folder)  # raises, and says what is missing
    return found


def _is_split(folder: Path) -> bool:
    return (folder / MANIFEST).exists() or (folder / _BEGUN).exists() or any(folder.glob("shard-*.tar"))


def verify_split(folder: Path, checks: Checks) -> tuple[Manifest | None, Findings]:
    """Check everything; None if the manifest itself is wrong, for then there is nothing to hold the rest against."""
    found = Findings(checks.most)
    try:
        manifest = read_manifest(folder)
    except DataError as error:
        if (folder / _BEGUN).exists() and not (folder / MANIFEST).exists():
            what = "`sopdist prepare` was interrupted; run it again to go on"
            found.add(Problem("incomplete", what, folder.name or str(folder)))
            return None, found
        found.add(Problem("manifest", str(error).removeprefix(f"{folder / MANIFEST}: "), MANIFEST))
        return None, found
    checks.begin(manifest)
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
        stop.set()  # after an interrupt nobody wants to wait for the shards at work
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
    """Returns `given`, if it is sound."""
    given = None
    paths = [path for path in (folder / FOLDER).glob("*") if path.suffix in (".npy", ".json")]
    for name in sorted({path.stem for path in paths} | {GIVEN}):
        try:
            for path in paths:
                if path.stem == name and not path.is_file():  # a pipe would be read for ever
                    raise DataError("not a plain file")
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
    """Equal hashes make suspects, whose keys are then read again and compared."""
    everywhere = np.concatenate(hashes)
    order = np.argsort(everywhere, kind="stable")
    equal = np.flatnonzero(everywhere[order[1:]] == everywhere[order[:-1]])
    suspects = np.unique(order[np.concatenate((equal, equal + 1))])
    starts = np.cumsum([0, *map(len, hashes)])  # a shard has as many keys as were found, not as the manifest says
    numbers = np.searchsorted(starts, suspects, side="right") - 1
    first_of: dict[str, tuple[int, int]] = {}
    for number in np.unique(numbers).tolist():
        info = manifest.shards[number]
        keys = read_keys(folder, info, checks.quick)
        for place in (suspects[numbers == number] - starts[number]).tolist():
            if place >= len(keys):
                continue  # the file was changed in between
            first_number, first_place = first_of.setdefault(keys[place], (number, place))
            if (first_number, first_place) != (number, place):
                first = manifest.shards[first_number]
                what = f"the same key as {first.name}, index {index_of(first, first_place)}"
                found.add(Problem("key", what, info.name, shown(keys[place]), index_of(info, place)))
