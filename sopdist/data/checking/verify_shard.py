"""Is a shard what the manifest says? Its checksum, its tar, its index, each of its samples.

Nothing is believed: keys and offsets are taken from the tar itself and then compared with the index. A member's name
only ever selects among image formats and json; nothing is unpickled, executed or written.
"""

from __future__ import annotations

import json
import os
import re
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ...files import sha256_of
from ..errors import DataError, ImageError
from ..headers import FORMATS, read_header
from ..labels import GIVEN, UNKNOWN, Labels
from ..manifest import Manifest, ShardInfo
from ..shards import parse_index, scan_tar

_SAFE_KEY = re.compile(r"[A-Za-z0-9_~%-]+(?:/[A-Za-z0-9_~%-]+)*")  # what keys.py makes


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, and where."""

    kind: str
    what: str
    file: str
    key: str | None = None
    index: int | None = None

    def __str__(self) -> str:
        key = "" if self.key is None else f", key {self.key}"
        index = "" if self.index is None else f", index {self.index}"
        return f"{self.file}{key}{index}: {self.what}"


@dataclass
class Findings:
    """All problems are counted; of each kind the first `most` are kept, or all."""

    most: int | None = None
    counts: dict[str, int] = field(default_factory=dict)
    problems: dict[str, list[Problem]] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """How many problems there are."""
        return sum(self.counts.values())

    def add(self, problem: Problem) -> None:
        """Take note of one."""
        self._take(problem.kind, 1, [problem])

    def merge(self, other: Findings) -> None:
        """Take over those of another."""
        for kind, problems in other.problems.items():
            self._take(kind, other.counts[kind], problems)

    def as_json(self) -> list[dict[str, Any]]:
        """Those that were kept, for a file."""
        return [asdict(problem) for problems in self.problems.values() for problem in problems]

    def _take(self, kind: str, count: int, problems: list[Problem]) -> None:
        self.counts[kind] = self.counts.get(kind, 0) + count
        kept = self.problems.setdefault(kind, [])
        kept += problems if self.most is None else problems[: self.most - len(kept)]


def _ignore(_: object) -> None:
    """Nobody watches."""


@dataclass(frozen=True)
class Checks:
    """What to look at, and whom to tell."""

    decode: Callable[[bytes], object] | None = None  # called with every image; ImageError if it cannot be decoded
    quick: bool = False  # do not read the tars
    workers: int = 1  # shards at a time
    most: int | None = None  # problems of a kind to keep
    begin: Callable[[Manifest], object] = _ignore  # called once it is clear what there is to check
    progress: Callable[[int], object] = _ignore  # called, from any thread, with the number of samples just done


class _Member(NamedTuple):
    name: str
    offset: int
    size: int

    @property
    def key(self) -> str:
        """Up to the first dot of the last part, as WebDataset and DALI cut it."""
        return self.name[: -len(self.extension) - 1] if self.extension else self.name

    @property
    def extension(self) -> str:
        return self.name.rpartition("/")[2].partition(".")[2]


class ShardCheck:
    """The checks of one shard; `found` fills while it runs."""

    def __init__(
        self, folder: Path, info: ShardInfo, manifest: Manifest, given: Labels | None, checks: Checks,
        stop: threading.Event,
    ) -> None:  # fmt: skip
        self.found = Findings(checks.most)
        self._folder, self._info, self._given, self._checks, self._stop = folder, info, given, checks, stop
        self._classes = len(manifest.classes)

    def run(self) -> list[str]:
        """Check the shard; returns its keys."""
        path, keys = self._folder / self._info.name, list[str]()
        index_text, index_keys = self._read_index()
        try:
            size = _size_of(path)
            if size != self._info.bytes:
                self._add("size", f"{size} bytes, the manifest says {self._info.bytes}; copy or prepare it again")
            keys = index_keys if self._checks.quick else self._check_tar(path, index_text, index_keys)
        except OSError as error:
            self._add("missing file", f"the manifest names it, but it cannot be read: {error.strerror}")
        for place, key in enumerate(keys):
            if not _SAFE_KEY.fullmatch(key):
                self._add("key", "not a key that sopdist writes; other readers may not cope with it", key, place)
        return keys

    def _read_index(self) -> tuple[str, list[str]]:
        """Its text and its keys; nothing if it cannot be read."""
        name, text = self._info.index_name, ""
        try:
            _size_of(self._folder / name)
            text = (self._folder / name).read_text(encoding="utf-8")
            keys = parse_index(text, name).keys
        except OSError as error:
            self._add("missing file", f"the index of a shard, but it cannot be read: {error.strerror}", file=name)
        except UnicodeDecodeError:
            self._add("index", "not text; copy or prepare the shard again", file=name)
        except DataError as error:
            what = str(error).removeprefix(name).removesuffix("; `sopdist verify` tells more")
            self._add("index", what.lstrip(":, "), file=name)
        else:
            self._check_count(len(keys), name)
            return text, keys
        return text, []

    def _check_tar(self, path: Path, index_text: str, index_keys: list[str]) -> list[str]:
        samples = list[list[_Member]]()
        with path.open("rb") as file:
            if sha256_of(path) != self._info.sha256:
                self._add("checksum", "its SHA-256 is not that of the manifest; copy or prepare it again")
            try:
                for sample in samples_of_tar(path):
                    samples.append(sample)
            except DataError as error:
                after = f", after sample {shown(samples[-1][0].key)}" if samples else ""
                self._add("tar", str(error).removeprefix(f"{path}: ") + after)
            else:
                self._check_count(len(samples), self._info.name)
                self._find_missing(samples, index_keys)
            self._compare_index(samples, index_text.splitlines()[1:])
            for place, members in enumerate(samples):
                if self._stop.is_set():
                    break
                self._check_sample(file.fileno(), place, members)
                self._checks.progress(1)
        return [members[0].key for members in samples]

    def _check_count(self, samples: int, file: str) -> None:
        if samples != self._info.samples:
            self._add("count", f"{samples} samples, the manifest says {self._info.samples}", file=file)

    def _find_missing(self, samples: list[list[_Member]], index_keys: list[str]) -> None:
        there = {members[0].key for members in samples}
        for place, key in enumerate(index_keys):
            if key not in there:
                self._add("sample", "the index names it, but it is not in the tar", key, place)

    def _compare_index(self, samples: list[list[_Member]], lines: list[str]) -> None:
        name = self._info.index_name
        if not lines:
            return  # was said
        for place, members in enumerate(samples):
            if place >= len(lines):
                self._add("index", "has no line for this sample of the tar", members[0].key, place, file=name)
                continue
            expected = " ".join(f"{member.extension} {member.offset} {member.size} {member.name}" for member in members)
            if lines[place] != expected:
                what = f"line {place + 2} says {lines[place]!r}, the tar has {expected!r}"
                self._add("index", what, members[0].key, place, file=name)

    def _check_sample(self, file: int, place: int, members: list[_Member]) -> None:
        key, extensions = members[0].key, [member.extension for member in members]
        if len(members) != 2 or extensions[0] not in FORMATS or extensions[1] != "json":
            what = f"has {' and '.join(extensions)}, expected an image ({', '.join(FORMATS)}) and then a json"
            self._add("sample", what, key, place)
            return
        try:
            image, record = (os.pread(file, member.size, member.offset) for member in members)
        except OSError as error:
            self._add("sample", f"cannot be read: {error.strerror}", key, place)
            return
        self._check_image(image, extensions[0], key, place)
        self._check_record(record, key, place)

    def _check_image(self, image: bytes, extension: str, key: str, place: int) -> None:
        try:
            found = read_header(image).format
            if found != extension:
                self._add("extension", f"is called .{extension}, but its content is {found}", key, place)
            if self._checks.decode is not None:
                self._checks.decode(image)
        except ImageError as reason:
            self._add("image", str(reason), key, place)

    def _check_record(self, content: bytes, key: str, place: int) -> None:
        try:
            record = json.loads(content)
        except (ValueError, RecursionError) as error:
            self._add("json", f"not JSON: {error}", key, place)
            return
        label = record.get("label") if isinstance(record, dict) else None
        if type(label) is not int:
            self._add("json", f"has no integer `label`: {record!r:.80}", key, place)
        elif not UNKNOWN <= label < self._classes:
            allowed = f"0 to {self._classes - 1}, and {UNKNOWN} for unknown"
            self._add("label", f"label {label} in its json; allowed are {allowed}", key, place)
        elif self._given is not None and place < self._info.samples:
            given = int(self._given[self._info.first + place])
            if label != given:
                self._add("label", f"label {label} in its json, {given} in label set {GIVEN!r}", key, place)

    def _add(
        self, kind: str, what: str, key: str | None = None, place: int | None = None, file: str | None = None
    ) -> None:
        index = None if place is None else index_of(self._info, place)
        self.found.add(Problem(kind, what, file or self._info.name, None if key is None else shown(key), index))


def _size_of(path: Path) -> int:
    """OSError if it is not there, or not a plain file: a pipe would be read for ever."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(0, "not a plain file")
    return found.st_size


def index_of(info: ShardInfo, place: int) -> int | None:
    """The index of a shard's sample; None for one beyond those that the manifest knows."""
    return info.first + place if place < info.samples else None


def shown(name: str) -> str:
    """A name from a tar, fit for a terminal: it may hold anything."""
    return name if name.isprintable() else name.encode("unicode_escape").decode()


def read_keys(folder: Path, info: ShardInfo, quick: bool) -> list[str]:
    """The keys of a shard that was checked before, as far as it can be read."""
    keys = []
    try:
        if quick:
            return parse_index((folder / info.index_name).read_text(encoding="utf-8"), info.index_name).keys
        for members in samples_of_tar(folder / info.name):
            keys.append(members[0].key)
    except (DataError, OSError, UnicodeDecodeError):
        pass  # was said when the shard was checked
    return keys


def samples_of_tar(path: Path) -> Iterator[list[_Member]]:
    """Members that follow one another under the same key, until an extension comes again, are a sample."""
    sample: list[_Member] = []
    try:
        for member in (_Member(*found) for found in scan_tar(path)):
            extensions = [other.extension for other in sample]
            if sample and (member.key != sample[0].key or member.extension in extensions):
                yield sample
                sample = []
            sample.append(member)
    except DataError:
        if sample:
            yield sample
        raise
    if sample:
        yield sample
