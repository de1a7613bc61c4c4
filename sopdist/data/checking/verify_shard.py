"""Checks of a shard against the manifest: its checksum, its tar, its index, and each of its samples.

Nothing is trusted: keys and offsets are read from the tar itself and then compared with the index. A member's name only
selects an image format or json; nothing is unpickled, executed or written.
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

from ...errors import DataError, ImageError
from ...files import sha256_of
from ..headers import FORMATS, read_header
from ..labels import GIVEN, UNKNOWN, Labels
from ..manifest import Manifest, ShardInfo
from ..shards import parse_index, scan_tar

_SAFE_KEY = re.compile(r"[A-Za-z0-9_~%-]+(?:/[A-Za-z0-9_~%-]+)*")  # keys as written by keys.py


@dataclass(frozen=True)
class Problem:
    """One problem and its location."""

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
    """Problems by kind. All are counted; the first `max_kept` of each kind are kept, or all if it is None."""

    max_kept: int | None = None
    counts: dict[str, int] = field(default_factory=dict)
    problems: dict[str, list[Problem]] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Number of problems."""
        return sum(self.counts.values())

    def add(self, problem: Problem) -> None:
        """Add a problem."""
        self._extend(problem.kind, 1, [problem])

    def merge(self, other: Findings) -> None:
        """Add all problems of `other`."""
        for kind, problems in other.problems.items():
            self._extend(kind, other.counts[kind], problems)

    def as_json(self) -> list[dict[str, Any]]:
        """The kept problems, for a JSON file."""
        return [asdict(problem) for problems in self.problems.values() for problem in problems]

    def _extend(self, kind: str, count: int, problems: list[Problem]) -> None:
        self.counts[kind] = self.counts.get(kind, 0) + count
        kept = self.problems.setdefault(kind, [])
        kept += problems if self.max_kept is None else problems[: self.max_kept - len(kept)]


def _ignore(_: object) -> None:
    """Default callback: does nothing."""


@dataclass(frozen=True)
class Checks:
    """Options and callbacks of a verification."""

    decode: Callable[[bytes], object] | None = None  # called with every image; raises ImageError if it is broken
    quick: bool = False  # do not read the tars
    workers: int = 1  # shards checked in parallel
    max_kept: int | None = None  # problems kept per kind
    on_start: Callable[[Manifest], object] = _ignore  # called after the manifest was read
    progress: Callable[[int], object] = _ignore  # called from any thread with the number of samples just checked


class _Member(NamedTuple):
    name: str
    offset: int
    size: int

    @property
    def key(self) -> str:
        """The name up to the first dot of its last component, as WebDataset and DALI split it."""
        return self.name[: -len(self.extension) - 1] if self.extension else self.name

    @property
    def extension(self) -> str:
        return self.name.rpartition("/")[2].partition(".")[2]


class ShardCheck:
    """Checks one shard; problems are added to `found`."""

    def __init__(
        self, folder: Path, info: ShardInfo, manifest: Manifest, given: Labels | None, checks: Checks,
        stop: threading.Event,
    ) -> None:  # fmt: skip
        self.found = Findings(checks.max_kept)
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
            self._add("missing file", f"listed in the manifest, but cannot be read: {error.strerror}")
        for position, key in enumerate(keys):
            if not _SAFE_KEY.fullmatch(key):
                self._add("key", "not a key that sopdist writes; other readers may fail on it", key, position)
        return keys

    def _read_index(self) -> tuple[str, list[str]]:
        """Text and keys of the index; no keys if it is damaged."""
        name, text = self._info.index_name, ""
        try:
            _size_of(self._folder / name)
            text = (self._folder / name).read_text(encoding="utf-8")
            keys = parse_index(text, name).keys
        except OSError as error:
            self._add("missing file", f"the index of a shard cannot be read: {error.strerror}", file=name)
        except UnicodeDecodeError:
            self._add("index", "not text; copy or prepare the shard again", file=name)
        except DataError as error:
            what = str(error).removeprefix(name).removesuffix("; run `sopdist verify` for details")
            self._add("index", what.lstrip(":, "), file=name)
        else:
            self._check_count(len(keys), name)
            return text, keys
        return text, []

    def _check_tar(self, path: Path, index_text: str, index_keys: list[str]) -> list[str]:
        samples = list[list[_Member]]()
        with path.open("rb") as file:
            if sha256_of(path) != self._info.sha256:
                self._add("checksum", "its SHA-256 does not match the manifest; copy or prepare it again")
            try:
                for sample in samples_of_tar(path):
                    samples.append(sample)
            except DataError as error:
                after = f", after sample {printable(samples[-1][0].key)}" if samples else ""
                self._add("tar", str(error).removeprefix(f"{path}: ") + after)
            else:
                self._check_count(len(samples), self._info.name)
                self._find_missing(samples, index_keys)
            self._compare_index(samples, index_text.splitlines()[1:])
            for position, members in enumerate(samples):
                if self._stop.is_set():
                    break
                self._check_sample(file.fileno(), position, members)
                self._checks.progress(1)
        return [members[0].key for members in samples]

    def _check_count(self, samples: int, file: str) -> None:
        if samples != self._info.samples:
            self._add("count", f"{samples} samples, the manifest says {self._info.samples}", file=file)

    def _find_missing(self, samples: list[list[_Member]], index_keys: list[str]) -> None:
        in_tar = {members[0].key for members in samples}
        for position, key in enumerate(index_keys):
            if key not in in_tar:
                self._add("sample", "in the index, but not in the tar", key, position)

    def _compare_index(self, samples: list[list[_Member]], lines: list[str]) -> None:
        name = self._info.index_name
        if not lines:
            return  # already reported
        for position, members in enumerate(samples):
            if position >= len(lines):
                self._add("index", "no line for this sample of the tar", members[0].key, position, file=name)
                continue
            expected = " ".join(f"{member.extension} {member.offset} {member.size} {member.name}" for member in members)
            if lines[position] != expected:
                what = f"line {position + 2} is {lines[position]!r}, the tar has {expected!r}"
                self._add("index", what, members[0].key, position, file=name)

    def _check_sample(self, file: int, position: int, members: list[_Member]) -> None:
        key, extensions = members[0].key, [member.extension for member in members]
        if len(members) != 2 or extensions[0] not in FORMATS or extensions[1] != "json":
            what = f"has {' and '.join(extensions)}, expected an image ({', '.join(FORMATS)}) followed by a json"
            self._add("sample", what, key, position)
            return
        try:
            image, record = (os.pread(file, member.size, member.offset) for member in members)
        except OSError as error:
            self._add("sample", f"cannot be read: {error.strerror}", key, position)
            return
        self._check_image(image, extensions[0], key, position)
        self._check_record(record, key, position)

    def _check_image(self, image: bytes, extension: str, key: str, position: int) -> None:
        try:
            found = read_header(image).format
            if found != extension:
                self._add("extension", f"the extension is .{extension}, but the content is {found}", key, position)
            if self._checks.decode is not None:
                self._checks.decode(image)
        except ImageError as reason:
            self._add("image", str(reason), key, position)

    def _check_record(self, content: bytes, key: str, position: int) -> None:
        try:
            record = json.loads(content)
        except (ValueError, RecursionError) as error:
            self._add("json", f"not JSON: {error}", key, position)
            return
        label = record.get("label") if isinstance(record, dict) else None
        if type(label) is not int:
            self._add("json", f"has no integer `label`: {record!r:.80}", key, position)
        elif not UNKNOWN <= label < self._classes:
            limits = f"from 0 to {self._classes - 1}, or {UNKNOWN} for unknown"
            self._add("label", f"label {label} in its json; must be {limits}", key, position)
        elif self._given is not None and position < self._info.samples:
            given = int(self._given[self._info.first + position])
            if label != given:
                self._add("label", f"label {label} in its json, but {given} in label set {GIVEN!r}", key, position)

    def _add(
        self, kind: str, what: str, key: str | None = None, position: int | None = None, file: str | None = None
    ) -> None:
        index = None if position is None else index_of(self._info, position)
        self.found.add(Problem(kind, what, file or self._info.name, None if key is None else printable(key), index))


def _size_of(path: Path) -> int:
    """Size of a file. Raises OSError if it is missing or not a regular file: reading a pipe would block."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(0, "not a regular file")
    return found.st_size


def index_of(info: ShardInfo, position: int) -> int | None:
    """Index of the sample at `position` in a shard; None if the manifest has fewer samples."""
    return info.first + position if position < info.samples else None


def printable(name: str) -> str:
    """A name from a tar, which may contain any bytes, made safe for the terminal."""
    return name if name.isprintable() else name.encode("unicode_escape").decode()


def read_keys(folder: Path, info: ShardInfo, quick: bool) -> list[str]:
    """Keys of a shard that was already checked, as far as it can be read."""
    keys = []
    try:
        if quick:
            return parse_index((folder / info.index_name).read_text(encoding="utf-8"), info.index_name).keys
        for members in samples_of_tar(folder / info.name):
            keys.append(members[0].key)
    except (DataError, OSError, UnicodeDecodeError):
        pass  # already reported when the shard was checked
    return keys


def samples_of_tar(path: Path) -> Iterator[list[_Member]]:
    """Group members into samples: consecutive members with the same key and different extensions."""
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
