"""The engine of `sopdist prepare`: from the images of a source to the shards, label sets and manifest of a split.

Each shard takes a fixed range of the source's images and is written by one thread, so the bytes do not depend on how
many there are. Decoding, encoding, hashing and reading release the interpreter's lock. It knows no data set.
"""

from __future__ import annotations

import errno
import itertools
import math
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from ...files import write_whole
from ..errors import DataError, ImageError
from ..keys import keys_of
from ..labels import FOLDER, GIVEN, Labels, check_labels, check_name, write_labels
from ..manifest import Manifest, ShardInfo, read_manifest, shard_name
from ..shards import Member, Shard, write_shard
from ..sources.order import Order, arrange
from ..sources.source import SourceSplit
from . import job as jobs
from .job import Job, Options, ShardRecord, readable
from .reencode import Encoded, fit_for_shard, strict_pillow

# Reasons that are the image's own and will be the same tomorrow. After all others, such as EIO, ESTALE or EMFILE, to
# skip it would lose a good sample for good.
_LASTING = frozenset((errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG))
_GO_ON = "then run the same command again: finished shards are kept"
_WHAT_TO_DO = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space",
    errno.EACCES: "make the folder writable for you",
    errno.EPERM: "make the folder writable for you",
    errno.EROFS: "choose an --out that can be written to",
}


@dataclass(frozen=True)
class Prepared:
    """A split that is complete."""

    folder: Path
    manifest: Manifest
    order: Order
    skipped: int
    was_there: bool  # from an earlier run of the same job
    added: tuple[str, ...] = ()  # label sets that the earlier run was not asked for


def prepare(source: str, splits: Sequence[SourceSplit], out: Path, options: Options) -> list[Prepared]:
    """Write each split to `out`/NAME. What an interrupted run finished is kept; a complete split gets no more
    than label sets that it does not have yet."""
    tasks = [_Task(source, split, out / split.name, options) for split in splits]
    stamp = jobs.overwritten_by(out, options.overwrite_once) if options.overwrite_once else None
    overwrite = options.overwrite or (stamp is not None and not stamp.exists())
    for task in tasks:  # all of them before the hours that the first may take
        with _writing(task.folder):
            jobs.is_complete(task.folder, task.job, overwrite)
    if overwrite:  # all of them, too: whoever goes on later must not take the last ones for already prepared
        for task in tasks:
            with _writing(task.folder), jobs.locked(task.folder):
                jobs.start_over(task.folder, task.job)
        if stamp is not None:
            with _writing(stamp):
                write_whole(stamp, b"")
    with strict_pillow():
        prepared = [_prepare_split(task) for task in tasks]
    if stamp is not None:
        stamp.unlink(missing_ok=True)
    return prepared


class _Task:
    """A split on its way into shards. Its methods are called by many threads."""

    def __init__(self, source: str, split: SourceSplit, folder: Path, options: Options) -> None:
        _check_source(split)
        self.source = source
        self.split, order = arrange(split, options.order, options.samples_per_shard)
        self.folder = folder
        self.options = replace(options, order=order)
        self.keys = keys_of(self.split.paths)
        self.job: Job = jobs.describe(source, self.split, self.options)
        self.stop = threading.Event()

    def origin_of(self, label_set: str) -> dict[str, Any]:
        """Where a label set comes from."""
        return self.split.origins.get(label_set, {"source": self.source})

    def numbers_of(self, shard: int) -> range:
        """Which of the source's images belong to a shard."""
        first = shard * self.options.samples_per_shard
        return range(first, min(first + self.options.samples_per_shard, len(self.split.paths)))

    def image(self, number: int) -> Encoded:
        """ImageError if it cannot be used, DataError if it could not be read just now."""
        try:
            content = self.split.read(number)
        except FileNotFoundError:
            raise ImageError("no such file") from None
        except OSError as error:
            what = f"cannot be read: {error.strerror or error}"
            if error.errno in _LASTING:
                raise ImageError(what) from None
            raise DataError(
                f"{readable(self.split.paths[number])}: {what}; that may pass, so the image is not left out. See to "
                f"the disk or the server, {_GO_ON}"
            ) from None
        return fit_for_shard(content, self.options.resize, self.options.quality)

    def write(self, shard: int, advance: Callable[[], None]) -> ShardRecord:
        """Write a shard and the record that it is finished; calls `advance` for each image."""
        path = self.folder / shard_name(shard)
        skipped: list[tuple[int, str]] = []
        members = self._members(shard, skipped, advance)
        with _writing(path):
            first = next(members, None)
            if first is None:  # a shard must have samples; the manifest goes without this one
                record = ShardRecord(0, 0, "", tuple(skipped))
            else:
                info = write_shard(path, itertools.chain([first], members))
                record = ShardRecord(info.samples, info.bytes, info.sha256, tuple(skipped))
            jobs.write_record(self.folder, shard, record)
        return record

    def is_still_right(self, record: ShardRecord) -> bool:
        """False if an image that was skipped can be used now: a corrected --root, a server that is back."""
        for number, _ in record.skipped:
            if self.stop.is_set():
                raise _StoppedError
            try:
                self.image(number)
            except ImageError:
                continue
            return False
        return True

    def _members(self, shard: int, skipped: list[tuple[int, str]], advance: Callable[[], None]) -> Iterator[Member]:
        given = self.split.labels[GIVEN]
        for number in self.numbers_of(shard):
            if self.stop.is_set():
                raise _StoppedError
            try:
                image = self.image(number)
            except ImageError as error:
                skipped.append((number, " ".join(str(error).split())))
            else:
                record = {"label": int(given[number]), "path": readable(self.split.paths[number])}
                yield Member(self.keys[number], image.format, image.content, record)
            advance()


class _StoppedError(Exception):
    """Another thread failed, or the user pressed Ctrl-C; unwinds, so that unfinished files are removed."""


@contextmanager
def _progress(name: str, images: int, done: int) -> Iterator[Callable[[], None]]:
    """A bar for a split; gives what threads call for each image. The `done` ones do not count for the speed."""
    lock = threading.Lock()
    interval = 0.1 if sys.stderr.isatty() else 30.0  # in a log file not ten lines a second
    with tqdm(desc=name, total=images, initial=done, unit=" images", mininterval=interval) as bar:

        def advance() -> None:
            with lock:
                bar.update()

        yield advance


def _prepare_split(task: _Task) -> Prepared:
    folder = task.folder
    with _writing(folder), jobs.locked(folder):
        if jobs.is_complete(folder, task.job, overwrite=False):
            jobs.forget_work(folder)  # if the earlier run was interrupted right after the manifest
            manifest, skipped = read_manifest(folder), jobs.skipped_count(folder)
            added = _add_label_sets(task, manifest)
            return Prepared(folder, manifest, task.options.order, skipped, was_there=True, added=added)
        done = jobs.begin(folder, task.job)
        records = _write_shards(task, done)
        return _finish(task, records)


def _write_shards(task: _Task, done: dict[int, ShardRecord]) -> list[ShardRecord]:
    """The records of all shards; those of `done` are not written again, unless there is reason to."""
    shards = range(math.ceil(len(task.split.paths) / task.options.samples_per_shard))
    with ThreadPoolExecutor(task.options.workers) as pool:
        try:
            doubtful = [shard for shard in done if done[shard].skipped]
            verdicts = pool.map(task.is_still_right, [done[shard] for shard in doubtful])
            for shard, right in zip(doubtful, verdicts, strict=True):
                if not right:
                    jobs.drop_record(task.folder, shard)
                    del done[shard]
            images_done = sum(len(task.numbers_of(shard)) for shard in done)
            with _progress(task.split.name, len(task.split.paths), images_done) as advance:
                futures = {pool.submit(task.write, shard, advance): shard for shard in shards if shard not in done}
                for future in as_completed(futures):
                    done[futures[future]] = future.result()
        except BaseException:
            task.stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    return [done[shard] for shard in shards]


def _finish(task: _Task, records: list[ShardRecord]) -> Prepared:
    """All shards are there: list what was skipped, then label sets, then the manifest, which makes it complete."""
    split, folder = task.split, task.folder
    skipped = [entry for record in records for entry in record.skipped]
    if skipped:
        lines = (f"{readable(split.paths[number])}\t{reason}\n" for number, reason in skipped)
        write_whole(folder / jobs.SKIPPED, "".join(lines).encode())
        _refuse_too_many(task, skipped)
    shards: list[ShardInfo] = []
    first = 0
    for number, record in enumerate(records):
        if record.samples:
            shards.append(ShardInfo(shard_name(number), first, record.samples, record.bytes, record.sha256))
            first += record.samples
    manifest = Manifest(task.job["dataset"], split.name, tuple(task.job["classes"]), tuple(shards))
    used = np.ones(len(split.paths), dtype=bool)
    used[[number for number, _ in skipped]] = False
    for name, labels in split.labels.items():
        write_labels(folder, manifest, name, labels[used], task.origin_of(name))
    jobs.write_source(folder, task.job, len(skipped))
    manifest.write(folder)
    jobs.forget_work(folder)
    return Prepared(folder, manifest, task.options.order, len(skipped), was_there=False)


def _add_label_sets(task: _Task, manifest: Manifest) -> tuple[str, ...]:
    """Write those that a complete split was made without; nothing else is touched."""
    folder = task.folder
    names = jobs.missing_label_sets(folder, task.job)
    if not names:
        return ()
    used = _which_are_in(task, manifest)
    sets = {name: check_labels(task.split.labels[name][used], manifest, f"label set {name!r}") for name in names}
    for name, labels in sets.items():
        if _is_taken(folder, name, labels):
            raise DataError(
                f"{folder}: has a label set {name!r} of another origin, with other labels; rename or remove "
                f"{folder / FOLDER / name}.npy and .json, {_GO_ON}"
            )
    for name, labels in sets.items():
        if not all(path.exists() for path in _label_files(folder, name)):
            write_labels(folder, manifest, name, labels, task.origin_of(name))
    jobs.note_label_sets(folder, task.job)
    return tuple(names)


def _which_are_in(task: _Task, manifest: Manifest) -> NDArray[np.bool_]:
    """Of the source's images, which are in the shards: all but those that were skipped."""
    there = [key for info in manifest.shards for key in Shard(task.folder, info).index.keys]
    keys = set(there)
    used = np.fromiter((key in keys for key in task.keys), bool, len(task.keys))
    if [key for key, is_used in zip(task.keys, used, strict=True) if is_used] != there:
        raise DataError(f"{task.folder}: its shards are not those of this job; run `sopdist verify {task.folder}`")
    return used


def _is_taken(folder: Path, name: str, labels: Labels) -> bool:
    """Has somebody else's label set this name? An array alone, with our labels, is what an interrupt left of ours."""
    array, about = _label_files(folder, name)
    if not array.exists():
        return about.exists()
    try:
        return not np.array_equal(np.load(array, allow_pickle=False), labels)
    except (OSError, ValueError, EOFError):
        return True


def _label_files(folder: Path, name: str) -> tuple[Path, Path]:
    return folder / FOLDER / f"{name}.npy", folder / FOLDER / f"{name}.json"


def _refuse_too_many(task: _Task, skipped: list[tuple[int, str]]) -> None:
    images = len(task.split.paths)
    share = len(skipped) / images
    if share <= task.options.max_bad and len(skipped) < images:
        return
    first = "; ".join(f"{readable(task.split.paths[number])} ({reason})" for number, reason in skipped[:3])
    enough = math.ceil(share * 1000) / 1000
    leave_out = "" if len(skipped) == images else f" To leave them out, run again with --max-bad {enough:g}."
    raise DataError(
        f"{task.folder}: {len(skipped):,} of {images:,} images cannot be used ({share:.1%}; --max-bad allows "
        f"{task.options.max_bad:.1%}). Is --root right? The first: {first}. All are listed in "
        f"{task.folder / jobs.SKIPPED}.{leave_out}"
    )


def _check_source(split: SourceSplit) -> None:
    """What would otherwise come to light after all images were written."""
    where = f"{split.dataset}, split {split.name}"
    if not split.paths:
        raise DataError(f"{where}: has no images; is --root right?")
    whole = Manifest(split.dataset, split.name, split.classes, (_one_shard(len(split.paths)),))
    for name, labels in split.labels.items():
        check_name(name)
        check_labels(labels, whole, f"{where}, label set {name!r}")


def _one_shard(samples: int) -> ShardInfo:
    return ShardInfo(shard_name(0), first=0, samples=samples, bytes=0, sha256="")


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """What the operating system refuses becomes a message with a way out."""
    try:
        yield
    except OSError as error:
        what_to_do = _WHAT_TO_DO.get(error.errno or 0, "choose another --out")
        where = error.filename if isinstance(error.filename, str) else path
        raise DataError(f"{where}: cannot be written: {error.strerror or error}; {what_to_do}, {_GO_ON}") from None
