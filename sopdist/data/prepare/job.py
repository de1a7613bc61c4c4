"""What a run of `sopdist prepare` is, and what it leaves in a split's folder so that the next run can tell.

    prepare.json         while at work: the job, that is all that decides the bytes of the shards
    shard-000123.done    while at work: this shard is whole; what is in it, and what was skipped
    source.json          when complete, beside the manifest: the job, and how many images were skipped
    skipped.txt          path and reason of each image that was left out

and beside the splits' folders, while at work, `.overwritten-by-NAME`: the run NAME has overwritten all that it is to.

Only files of these names, shards and label sets are ever deleted.
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

from ...files import PART_SUFFIX, write_whole
from .. import labels
from ..errors import DataError
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
    """How to prepare."""

    resize: int | None = None  # longest short side; None: images as they are
    quality: int = QUALITY  # of the JPEGs that resizing writes
    samples_per_shard: int = 1000
    workers: int = 1
    max_bad: float = 0.01  # share of a split's images that may be unusable
    order: Order = "auto"  # in which images go into shards; see sources/order.py
    overwrite: bool = False
    overwrite_once: str = ""  # the name of a run that overwrites when it is first started, and goes on after that


@dataclass(frozen=True)
class ShardRecord:
    """What is known of a finished shard. One without samples has no tar: all of its images were skipped."""

    samples: int
    bytes: int
    sha256: str
    skipped: tuple[tuple[int, str], ...]  # number in the source, reason


def readable(path: str) -> str:
    """The path as it is, or percent-encoded if it is not UTF-8 or would break a line of text."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return quote(os.fsencode(path))
    return quote(path) if any(character < " " for character in path) else path


def describe(source: str, split: SourceSplit, options: Options) -> Job:
    """All that decides the bytes of the split's shards and label sets, short of the images themselves."""
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
    """Is this job done already, but perhaps for label sets? DataError if the folder must not be written to."""
    if not folder.exists():
        return False
    if not folder.is_dir():
        raise DataError(f"{folder}: is a file; choose another --out")
    names = {path.name for path in folder.iterdir()} - {_JOB + PART_SUFFIX}
    if not names:
        return False
    if not names & {_JOB, _SOURCE}:
        _refuse_what_is_not_ours(folder, names)
    if overwrite:
        return False
    start_anew = "; to delete what is there and start anew, add --overwrite"
    if MANIFEST not in names and _JOB not in names:
        raise DataError(f"{folder}: has lost its {MANIFEST}; put it back{start_anew}")
    there = _read_source(folder).get("job") if MANIFEST in names else _read_json(folder / _JOB)
    if MANIFEST in names and _differ_in_label_sets_only(there, job):
        return True
    if there != job:
        state = "prepared" if MANIFEST in names else "begun"
        raise DataError(f"{folder}: was {state} differently: {_differences(there, job)}{start_anew}")
    return MANIFEST in names


def start_over(folder: Path, job: Job) -> None:
    """Nothing that is there counts any more: from now on the folder is that of this job, which has just begun."""
    folder.mkdir(parents=True, exist_ok=True)
    # What makes a split look complete goes first, what makes a shard look finished next.
    (folder / MANIFEST).unlink(missing_ok=True)
    for path in folder.glob("shard-*.done"):
        path.unlink()
    write_whole(folder / _JOB, _as_json(job))


def begin(folder: Path, job: Job) -> dict[int, ShardRecord]:
    """Make the folder ready for the job; returns the shards that an earlier run finished."""
    if not (folder / _JOB).exists():
        start_over(folder, job)
    done = {}
    for number in range(-(-job["images"] // job["samples per shard"])):
        record = _read_record(folder, number)
        if record is not None:
            done[number] = record
    _sweep(folder, keep={_JOB, *(name for number in done for name in _files_of(number))})
    return done


def write_record(folder: Path, number: int, record: ShardRecord) -> None:
    """Say that a shard is finished; the last thing that is written of it."""
    write_whole(folder / _done_name(number), _as_json(asdict(record)))


def drop_record(folder: Path, number: int) -> None:
    """A shard has to be written again."""
    (folder / _done_name(number)).unlink(missing_ok=True)


def write_source(folder: Path, job: Job, skipped: int) -> None:
    """Say what the split was made from; just before the manifest is written."""
    write_whole(folder / _SOURCE, _as_json({"job": job, "skipped": skipped}))


def missing_label_sets(folder: Path, job: Job) -> list[str]:
    """Which label sets of the job a complete split was made without."""
    there = _read_source(folder).get("job", {}).get("labels", {})
    return [name for name in job["labels"] if name not in there]


def note_label_sets(folder: Path, job: Job) -> None:
    """A complete split has the label sets of this job, too, now."""
    source = _read_source(folder)
    source["job"]["labels"] = dict(sorted({**source["job"]["labels"], **job["labels"]}.items()))
    write_whole(folder / _SOURCE, _as_json(source))


def skipped_count(folder: Path) -> int:
    """How many images a complete split left out."""
    count = _read_source(folder).get("skipped")
    return count if isinstance(count, int) else 0


def forget_work(folder: Path) -> None:
    """The manifest says it all now: remove what only served to go on after an interrupt."""
    for path in folder.glob("shard-*.done"):
        path.unlink()
    if (folder / _JOB).exists():  # to delete what is absent is an error, too, where nothing may be written
        (folder / _JOB).unlink()


def overwritten_by(out: Path, name: str) -> Path:
    """The file that says that a run has overwritten its splits, and must not do so again."""
    return out / f".overwritten-by-{name}"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Refuse a second run in the same folder: it would take the first one's unfinished files for left-overs."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"{folder}: another `sopdist prepare` is at work here") from None
        except OSError:
            pass  # a file system without locks: then it is up to the user
        yield
    finally:
        os.close(descriptor)


def _refuse_what_is_not_ours(folder: Path, names: set[str]) -> None:
    """A manifest alone will do, as a split that was copied without the rest is still one."""
    if MANIFEST in names:
        try:
            read_manifest(folder)
        except DataError:
            pass
        else:
            return
    some = ", ".join(sorted(map(readable, names))[:3])
    raise DataError(
        f"{folder}: not empty, and not made by `sopdist prepare` (it has {some}); choose another --out or empty it"
    )


def _differ_in_label_sets_only(there: Any, wanted: Job) -> bool:
    """Are these the same samples, with the same labels in the sets that both have? Others need no other shards."""
    if not isinstance(there, dict) or not isinstance(there.get("labels"), dict):
        return False
    both = there["labels"].keys() & wanted["labels"].keys()
    same = all(there["labels"][name] == wanted["labels"][name] for name in both)
    return same and {**there, "labels": None} == {**wanted, "labels": None}


def _differences(there: Any, wanted: Job) -> str:
    if not isinstance(there, dict):
        return "it is not known how"
    differing = [name for name in wanted if there.get(name) != wanted[name]]
    differing += sorted(there.keys() - wanted.keys())
    told = []
    for name in differing:
        values = [repr(fields.get(name)) for fields in (there, wanted)]
        short = max(map(len, values)) <= 40  # not checksums and lists of classes
        told.append(f"{name} (there {values[0]}, now {values[1]})" if short else name)
    return ", ".join(told)


def _sweep(folder: Path, keep: set[str]) -> None:
    """Delete all of our files but `keep`. Without a manifest no label set can be valid, so they go, too."""
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
    """None if the shard is not finished, or if its files are not as they were."""
    tar, index, done = (folder / name for name in _files_of(number))
    try:
        fields = json.loads(done.read_bytes())
        record = ShardRecord(**{**fields, "skipped": tuple((int(n), str(why)) for n, why in fields["skipped"])})
        whole = record.samples == 0 or (tar.stat().st_size == record.bytes and index.stat().st_size > 0)
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return record if whole else None


def _read_source(folder: Path) -> Job:
    content = _read_json(folder / _SOURCE)
    return content if isinstance(content, dict) else {}


def _read_json(path: Path) -> Any:
    """None if it is absent or damaged: then it is not known what was done, which equals no job."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def _as_json(content: Any) -> bytes:
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()
