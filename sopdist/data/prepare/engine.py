"""The engine of `sopdist prepare`: writes the images of a source as shards, label sets and manifest of a split.

Each shard gets a fixed range of the source's images and is written by one thread, so the bytes do not depend on the
number of threads. Decoding, encoding, hashing and reading release the GIL. Independent of the data set.
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

from ...errors import DataError, ImageError
from ...files import write_atomic
from ..keys import keys_of
from ..labels import FOLDER, GIVEN, Labels, check_labels, check_name, write_labels
from ..manifest import Manifest, ShardInfo, read_manifest, shard_name
from ..shards import Member, Shard, write_shard
from ..sources.order import Order, arrange
from ..sources.source import SourceSplit
from . import job as jobs
from .job import Job, Options, ShardRecord, readable
from .reencode import Encoded, encode_for_shard, strict_pillow

# Permanent errors of a single image. All others, such as EIO, ESTALE or EMFILE, may be temporary: skipping the image
# would lose a good sample.
_PERMANENT = frozenset((errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG))
_RESUME = "then run the same command again: finished shards are kept"
_ADVICE = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space",
    errno.EACCES: "get write permission for the folder",
    errno.EPERM: "get write permission for the folder",
    errno.EROFS: "choose a writable --out",
}


@dataclass(frozen=True)
class Prepared:
    """A complete split."""

    folder: Path
    manifest: Manifest
    order: Order
    skipped: int
    existed: bool  # complete from an earlier run of the same job
    added: tuple[str, ...] = ()  # label sets added to an existing split


def prepare(source: str, splits: Sequence[SourceSplit], out: Path, options: Options) -> list[Prepared]:
    """Write each split to `out`/NAME. Shards that an interrupted run finished are kept; a complete split only gets
    label sets that it does not have yet."""
    tasks = [_Task(source, split, out / split.name, options) for split in splits]
    stamp = jobs.overwrite_stamp(out, options.overwrite_once) if options.overwrite_once else None
    overwrite = options.overwrite or (stamp is not None and not stamp.exists())
    for task in tasks:  # check all of them first: writing the first may take hours
        with _writing(task.folder):
            jobs.is_complete(task.folder, task.job, overwrite)
    if overwrite:  # also invalidate all of them first: a resumed run must not mistake the last ones for prepared
        for task in tasks:
            with _writing(task.folder), jobs.locked(task.folder):
                jobs.start_over(task.folder, task.job)
        if stamp is not None:
            with _writing(stamp):
                write_atomic(stamp, b"")
    with strict_pillow():
        prepared = [_prepare_split(task) for task in tasks]
    if stamp is not None:
        stamp.unlink(missing_ok=True)
    return prepared


class _Task:
    """A split that is being written. Its methods are called from many threads."""

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
        """Origin of a label set."""
        return self.split.origins.get(label_set, {"source": self.source})

    def images_of(self, shard: int) -> range:
        """Positions in the source of the images of a shard."""
        first = shard * self.options.samples_per_shard
        return range(first, min(first + self.options.samples_per_shard, len(self.split.paths)))

    def image(self, i: int) -> Encoded:
        """Read and encode image `i`. Raises ImageError if it cannot be used, DataError if an error may be temporary."""
        try:
            content = self.split.read(i)
        except FileNotFoundError:
            raise ImageError("no such file") from None
        except OSError as error:
            what = f"cannot be read: {error.strerror or error}"
            if error.errno in _PERMANENT:
                raise ImageError(what) from None
            raise DataError(
                f"{readable(self.split.paths[i])}: {what}; this may be temporary, so the image is not skipped. Check "
                f"the disk or the server, {_RESUME}"
            ) from None
        return encode_for_shard(content, self.options.resize, self.options.quality)

    def write(self, shard: int, advance: Callable[[], None]) -> ShardRecord:
        """Write a shard and its record; calls `advance` after each image."""
        path = self.folder / shard_name(shard)
        skipped: list[tuple[int, str]] = []
        members = self._members(shard, skipped, advance)
        with _writing(path):
            first = next(members, None)
            if first is None:  # a shard cannot be empty; the manifest leaves this one out
                record = ShardRecord(0, 0, "", tuple(skipped))
            else:
                info = write_shard(path, itertools.chain([first], members))
                record = ShardRecord(info.samples, info.bytes, info.sha256, tuple(skipped))
            jobs.write_record(self.folder, shard, record)
        return record

    def is_up_to_date(self, record: ShardRecord) -> bool:
        """False if a skipped image can be used now, e.g. after --root was corrected or a server is back."""
        for i, _ in record.skipped:
            if self.stop.is_set():
                raise _StoppedError
            try:
                self.image(i)
            except ImageError:
                continue
            return False
        return True

    def _members(self, shard: int, skipped: list[tuple[int, str]], advance: Callable[[], None]) -> Iterator[Member]:
        given = self.split.labels[GIVEN]
        for i in self.images_of(shard):
            if self.stop.is_set():
                raise _StoppedError
            try:
                image = self.image(i)
            except ImageError as error:
                skipped.append((i, " ".join(str(error).split())))
            else:
                record = {"label": int(given[i]), "path": readable(self.split.paths[i])}
                yield Member(self.keys[i], image.format, image.content, record)
            advance()


class _StoppedError(Exception):
    """Another thread failed, or the user pressed Ctrl-C. Unwinds the thread, so that unfinished files are removed."""


@contextmanager
def _progress(name: str, images: int, done: int) -> Iterator[Callable[[], None]]:
    """A progress bar; yields a thread-safe function to call after each image. The `done` ones do not count as speed."""
    lock = threading.Lock()
    interval = 0.1 if sys.stderr.isatty() else 30.0  # in a log file, only every 30 s
    with tqdm(desc=name, total=images, initial=done, unit=" images", mininterval=interval) as bar:

        def advance() -> None:
            with lock:
                bar.update()

        yield advance


def _prepare_split(task: _Task) -> Prepared:
    folder = task.folder
    with _writing(folder), jobs.locked(folder):
        if jobs.is_complete(folder, task.job, overwrite=False):
            jobs.remove_work_files(folder)  # if the earlier run was interrupted right after writing the manifest
            manifest, skipped = read_manifest(folder), jobs.skipped_count(folder)
            added = _add_label_sets(task, manifest)
            return Prepared(folder, manifest, task.options.order, skipped, existed=True, added=added)
        done = jobs.start(folder, task.job)
        records = _write_shards(task, done)
        return _finish(task, records)


def _write_shards(task: _Task, done: dict[int, ShardRecord]) -> list[ShardRecord]:
    """Write all shards and return their records. Shards in `done` are kept if they are up to date."""
    shards = range(math.ceil(len(task.split.paths) / task.options.samples_per_shard))
    with ThreadPoolExecutor(task.options.workers) as pool:
        try:
            with_skipped = [shard for shard in done if done[shard].skipped]
            checks = pool.map(task.is_up_to_date, [done[shard] for shard in with_skipped])
            for shard, up_to_date in zip(with_skipped, checks, strict=True):
                if not up_to_date:
                    jobs.drop_record(task.folder, shard)
                    del done[shard]
            images_done = sum(len(task.images_of(shard)) for shard in done)
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
    """All shards exist: write the list of skipped images, the label sets, and last the manifest."""
    split, folder = task.split, task.folder
    skipped = [entry for record in records for entry in record.skipped]
    if skipped:
        lines = (f"{readable(split.paths[i])}\t{reason}\n" for i, reason in skipped)
        write_atomic(folder / jobs.SKIPPED, "".join(lines).encode())
        _refuse_too_many(task, skipped)
    shards: list[ShardInfo] = []
    first = 0
    for number, record in enumerate(records):
        if record.samples:
            shards.append(ShardInfo(shard_name(number), first, record.samples, record.bytes, record.sha256))
            first += record.samples
    manifest = Manifest(task.job["dataset"], split.name, tuple(task.job["classes"]), tuple(shards))
    used = np.ones(len(split.paths), dtype=bool)
    used[[i for i, _ in skipped]] = False
    for name, labels in split.labels.items():
        write_labels(folder, manifest, name, labels[used], task.origin_of(name))
    jobs.write_source(folder, task.job, len(skipped))
    manifest.write(folder)
    jobs.remove_work_files(folder)
    return Prepared(folder, manifest, task.options.order, len(skipped), existed=False)


def _add_label_sets(task: _Task, manifest: Manifest) -> tuple[str, ...]:
    """Write the label sets that a complete split does not have yet; nothing else is changed."""
    folder = task.folder
    names = jobs.missing_label_sets(folder, task.job)
    if not names:
        return ()
    used = _used_images(task, manifest)
    sets = {name: check_labels(task.split.labels[name][used], manifest, f"label set {name!r}") for name in names}
    for name, labels in sets.items():
        if _exists_with_other_labels(folder, name, labels):
            raise DataError(
                f"{folder}: already has a label set {name!r} with other labels; rename or remove "
                f"{folder / FOLDER / name}.npy and .json, {_RESUME}"
            )
    for name, labels in sets.items():
        if not all(path.exists() for path in _label_files(folder, name)):
            write_labels(folder, manifest, name, labels, task.origin_of(name))
    jobs.record_label_sets(folder, task.job)
    return tuple(names)


def _used_images(task: _Task, manifest: Manifest) -> NDArray[np.bool_]:
    """Mask of the source's images that are in the shards, i.e. that were not skipped; (images,)."""
    in_shards = [key for info in manifest.shards for key in Shard(task.folder, info).index.keys]
    keys = set(in_shards)
    used = np.fromiter((key in keys for key in task.keys), bool, len(task.keys))
    if [key for key, is_used in zip(task.keys, used, strict=True) if is_used] != in_shards:
        raise DataError(f"{task.folder}: its shards do not match this job; run `sopdist verify {task.folder}`")
    return used


def _exists_with_other_labels(folder: Path, name: str, labels: Labels) -> bool:
    """Whether there is another label set of this name. An array with our labels but no description is ours: an
    interrupt left it."""
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
    bad = len(skipped) / images
    if bad <= task.options.max_bad and len(skipped) < images:
        return
    first = "; ".join(f"{readable(task.split.paths[i])} ({reason})" for i, reason in skipped[:3])
    enough = math.ceil(bad * 1000) / 1000
    skip_them = "" if len(skipped) == images else f" To skip them, run again with --max-bad {enough:g}."
    raise DataError(
        f"{task.folder}: {len(skipped):,} of {images:,} images cannot be used ({bad:.1%}; --max-bad allows "
        f"{task.options.max_bad:.1%}). Is --root correct? The first: {first}. All are listed in "
        f"{task.folder / jobs.SKIPPED}.{skip_them}"
    )


def _check_source(split: SourceSplit) -> None:
    """Check the labels now, not after all images were written."""
    where = f"{split.dataset}, split {split.name}"
    if not split.paths:
        raise DataError(f"{where}: has no images; is --root correct?")
    manifest = Manifest(split.dataset, split.name, split.classes, (_one_shard(len(split.paths)),))
    for name, labels in split.labels.items():
        check_name(name)
        check_labels(labels, manifest, f"{where}, label set {name!r}")


def _one_shard(samples: int) -> ShardInfo:
    return ShardInfo(shard_name(0), first=0, samples=samples, bytes=0, sha256="")


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn an OSError into a DataError that says what to do."""
    try:
        yield
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, "choose another --out")
        where = error.filename if isinstance(error.filename, str) else path
        raise DataError(f"{where}: cannot be written: {error.strerror or error}; {advice}, {_RESUME}") from None
