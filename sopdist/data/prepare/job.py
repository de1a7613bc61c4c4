"""The job of a run of `sopdist prepare`, and the files in a split's folder that allow the next run to resume it.

    prepare.json         during the run: the job, i.e. everything that determines the bytes of the shards
    shard-000123.done    during the run: this shard is complete; its size, checksum and skipped images
    source.json          when complete, next to the manifest: the job and the number of skipped images
    skipped.txt          path and reason of each skipped image

During the run, the parent folder also has `.overwritten-by-NAME` once run NAME of --overwrite-once has overwritten the
splits.

Only files with these names, shards and label sets are ever deleted.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ...errors import DataError
from ...files import PART_SUFFIX, write_atomic
from .. import labels
from ..manifest import MANIFEST, index_name, read_manifest, shard_name
from ..sources.order import Order
from ..sources.source import SourceSplit
from .reencode import QUALITY

SKIPPED = "skipped.txt"
_JOB = "prepare.json"
_SOURCE = "source.json"
_PART = f"({re.escape(PART_SUFFIX)})?"
_OURS = re.compile(
    rf"(shard-\d{{6,}}\.(tar|idx|done)|{'|'.join(map(re.escape, (_JOB, _SOURCE, SKIPPED, MANIFEST)))}){_PART}"
)
_OUR_LABELS = re.compile(rf".+\.(npy|json){_PART}")

Job = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """Options of `sopdist prepare`."""

    resize: int | None = None  # maximum length of the short side; None: do not resize
    quality: int = QUALITY  # of the JPEGs that resizing writes
    samples_per_shard: int = 1000
    workers: int = 1
    max_bad: float = 0.01  # fraction of a split's images that may be unusable
    order: Order = "auto"  # of the images in the shards; see sources/order.py
    overwrite: bool = False
    overwrite_once: str = ""  # name of a run that overwrites when first started, and resumes after that


@dataclass(frozen=True)
class ShardRecord:
    """Record of a finished shard. A shard without samples has no tar: all of its images were skipped."""

    samples: int
    bytes: int
    sha256: str
    skipped: tuple[tuple[int, str], ...]  # position in the source, reason


def readable(path: str) -> str:
    """The path, percent-encoded if it is not UTF-8 or contains control characters."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return quote(os.fsencode(path))
    return quote(path) if any(character < " " for character in path) else path


def describe(source: str, split: SourceSplit, options: Options) -> Job:
    """Everything that determines the bytes of the shards and label sets, except the images themselves."""
    return {
        "source": source,
        "dataset": readable(split.dataset),
        "split": split.name,
        "classes": [readable(name) for name in split.classes],
        "images": len(split.paths),
        "paths": hashlib.sha256(b"\0".join(map(os.fsencode, split.paths))).hexdigest(),
        "labels": {
            name: hashlib.sha256(numbers.astype("<i8").tobytes()).hexdigest()
            for name, numbers in sorted(split.labels.items())
        },
        "order": options.order,
        "samples per shard": options.samples_per_shard,
        "resize": options.resize,
        "quality": None if options.resize is None else options.quality,
        **({} if split.held_out is None else {"held out": split.held_out}),
    }


def is_complete(folder: Path, job: Job, overwrite: bool) -> bool:
    """Whether this job is complete, except perhaps for label sets. Raises DataError if the folder must not change."""
    if not folder.exists():
        return False
    if not folder.is_dir():
        raise DataError(f"{folder}: is a file; choose another --out")
    names = {path.name for path in folder.iterdir()} - {_JOB + PART_SUFFIX}
    if not names:
        return False
    if not names & {_JOB, _SOURCE}:
        _refuse_foreign_files(folder, names)
    if overwrite:
        return False
    advice = "; to delete it and start from scratch, add --overwrite"
    if MANIFEST not in names and _JOB not in names:
        raise DataError(f"{folder}: its {MANIFEST} is missing; restore it{advice}")
    found = _read_source(folder).get("job") if MANIFEST in names else _read_json(folder / _JOB)
    if MANIFEST in names and _differ_only_in_label_sets(found, job):
        return True
    if found != job:
        state = "prepared" if MANIFEST in names else "started"
        raise DataError(f"{folder}: was {state} differently: {_differences(found, job)}{advice}")
    return MANIFEST in names


def start_over(folder: Path, job: Job) -> None:
    """Invalidate everything in the folder and start this job in it."""
    folder.mkdir(parents=True, exist_ok=True)
    # First remove the file that makes the split look complete, then those that make shards look finished.
    (folder / MANIFEST).unlink(missing_ok=True)
    for path in folder.glob("shard-*.done"):
        path.unlink()
    write_atomic(folder / _JOB, _as_json(job))


def start(folder: Path, job: Job) -> dict[int, ShardRecord]:
    """Prepare the folder for the job; returns the shards that an earlier run finished."""
    if not (folder / _JOB).exists():
        start_over(folder, job)
    done = {}
    for number in range(-(-job["images"] // job["samples per shard"])):
        record = _read_record(folder, number)
        if record is not None:
            done[number] = record
    _delete_others(folder, keep={_JOB, *(name for number in done for name in _files_of(number))})
    return done


def write_record(folder: Path, number: int, record: ShardRecord) -> None:
    """Mark a shard as finished. This is the last file written for a shard."""
    write_atomic(folder / _done_name(number), _as_json(asdict(record)))


def drop_record(folder: Path, number: int) -> None:
    """Mark a shard as unfinished."""
    (folder / _done_name(number)).unlink(missing_ok=True)


def write_source(folder: Path, job: Job, skipped: int) -> None:
    """Write the job of the split and the number of skipped images, just before the manifest."""
    write_atomic(folder / _SOURCE, _as_json({"job": job, "skipped": skipped}))


def missing_label_sets(folder: Path, job: Job) -> list[str]:
    """Label sets of the job that a complete split was prepared without."""
    existing = _read_source(folder).get("job", {}).get("labels", {})
    return [name for name in job["labels"] if name not in existing]


def record_label_sets(folder: Path, job: Job) -> None:
    """Record that a complete split now also has the label sets of this job."""
    source = _read_source(folder)
    source["job"]["labels"] = dict(sorted({**source["job"]["labels"], **job["labels"]}.items()))
    write_atomic(folder / _SOURCE, _as_json(source))


def skipped_count(folder: Path) -> int:
    """Number of images that were skipped in a complete split."""
    count = _read_source(folder).get("skipped")
    return count if isinstance(count, int) else 0


def remove_work_files(folder: Path) -> None:
    """Remove the files that are only needed to resume; the manifest replaces them."""
    for path in folder.glob("shard-*.done"):
        path.unlink()
    if (folder / _JOB).exists():  # on a read-only file system, even deleting a missing file is an error
        (folder / _JOB).unlink()


def overwrite_stamp(out: Path, name: str) -> Path:
    """The file that marks that run `name` has overwritten its splits and must not do so again."""
    return out / f".overwritten-by-{name}"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Refuse a second run in the same folder: it would delete the unfinished files of the first one."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"{folder}: another `sopdist prepare` is running here") from None
        except OSError:
            pass  # a file system without locks: the user must take care
        yield
    finally:
        os.close(descriptor)


def _refuse_foreign_files(folder: Path, names: set[str]) -> None:
    """Refuse a folder that is not a split. A valid manifest suffices: other files may be missing in a copied split."""
    if MANIFEST in names:
        try:
            read_manifest(folder)
        except DataError:
            pass
        else:
            return
    some = ", ".join(sorted(map(readable, names))[:3])
    raise DataError(
        f"{folder}: not empty, and not created by `sopdist prepare` (it has {some}); choose another --out or empty it"
    )


def _differ_only_in_label_sets(found: Any, wanted: Job) -> bool:
    """Whether both jobs have the same shards, and the same labels in the label sets that both have."""
    if not isinstance(found, dict) or not isinstance(found.get("labels"), dict):
        return False
    both = found["labels"].keys() & wanted["labels"].keys()
    same = all(found["labels"][name] == wanted["labels"][name] for name in both)
    return same and {**found, "labels": None} == {**wanted, "labels": None}


def _differences(found: Any, wanted: Job) -> str:
    if not isinstance(found, dict):
        return "its options are not known"
    differing = [name for name in wanted if found.get(name) != wanted[name]]
    differing += sorted(found.keys() - wanted.keys())
    texts = []
    for name in differing:
        values = [repr(fields.get(name)) for fields in (found, wanted)]
        short = max(map(len, values)) <= 40  # not checksums and lists of classes
        texts.append(f"{name} (was {values[0]}, now {values[1]})" if short else name)
    return ", ".join(texts)


def _delete_others(folder: Path, keep: set[str]) -> None:
    """Delete all of our files except `keep`, and all label sets, which are not valid without a manifest."""
    for path in folder.iterdir():
        if _OURS.fullmatch(path.name) and path.name not in keep:
            path.unlink()
    if (folder / labels.FOLDER).is_dir():
        for path in (folder / labels.FOLDER).iterdir():
            if _OUR_LABELS.fullmatch(path.name):
                path.unlink()


def _done_name(number: int) -> str:
    return shard_name(number).removesuffix(".tar") + ".done"


def _files_of(number: int) -> tuple[str, str, str]:
    name = shard_name(number)
    return name, index_name(name), _done_name(number)


def _read_record(folder: Path, number: int) -> ShardRecord | None:
    """The record of a finished shard; None if it is not finished, or if its files have changed."""
    tar, index, done = (folder / name for name in _files_of(number))
    try:
        fields = json.loads(done.read_bytes())
        record = ShardRecord(**{**fields, "skipped": tuple((int(n), str(why)) for n, why in fields["skipped"])})
        intact = record.samples == 0 or (tar.stat().st_size == record.bytes and index.stat().st_size > 0)
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return record if intact else None


def _read_source(folder: Path) -> Job:
    content = _read_json(folder / _SOURCE)
    return content if isinstance(content, dict) else {}


def _read_json(path: Path) -> Any:
    """The content of a JSON file; None, which differs from every job, if it is missing or damaged."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def _as_json(content: Any) -> bytes:
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()
