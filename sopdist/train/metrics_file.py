"""`metrics.jsonl`: one JSON object a line, handed to the disk at once. It knows lines, not what is measured in them.

A crash costs the line that was being written; a full disk costs nothing, if it is not full for ever.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..data.errors import DataError
from ..files import whole_file

_MOST_KEPT = 10_000  # lines that wait for a disk that is full

_logger = logging.getLogger("sopdist.train")


class MetricsFile:
    """Lines that are added to a file, which may have some already."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting: deque[bytes] = deque(maxlen=_MOST_KEPT)
        self._failed = False
        try:
            with path.open("ab+") as file:
                _cut_torn_line(file.fileno())
        except OSError as error:
            raise DataError(f"{path}: cannot be written: {error.strerror or error}") from None

    def add(self, record: Mapping[str, Any]) -> None:
        """Write a line. If that fails, warn, and try again with the next one."""
        self._waiting.append(json.dumps(plain(record), allow_nan=False).encode() + b"\n")
        try:
            self._write(b"".join(self._waiting))
        except OSError as error:
            if not self._failed:
                reason = error.strerror or error
                _logger.warning("%s: CANNOT BE WRITTEN: %s; the run goes on and tries again", self.path, reason)
            self._failed = True
            return
        self._waiting.clear()
        if self._failed:
            _logger.warning("%s: can be written again", self.path)
        self._failed = False

    def sync(self) -> None:
        """Have what was written down to the disk, where a power cut does not reach it.

        OSError if there are lines that could not be written yet. Other threads than the one that writes may call it.
        """
        if self._failed:  # not `_waiting`: a line that is being written at this moment is none of them
            raise OSError(f"{self.path}: lines could not be written yet")
        with self.path.open("rb") as file:
            os.fsync(file.fileno())

    def rewind(self, step: int) -> None:
        """Drop the lines past a step, which will be written again."""
        kept = [record for record in read_lines(self.path) if record["step"] <= step]
        try:
            with whole_file(self.path) as file:
                for record in kept:
                    file.write(json.dumps(record).encode() + b"\n")
        except OSError as error:
            raise DataError(f"{self.path}: cannot be written: {error.strerror or error}") from None

    def _write(self, content: bytes) -> None:
        """All of it or nothing. Opened each time: a network drive tells only on closing that it is full."""
        size = None
        try:
            with self.path.open("ab", buffering=0) as file:
                size = file.seek(0, os.SEEK_END)
                rest = memoryview(content)
                while rest:
                    rest = rest[file.write(rest) :]
        except OSError:
            if size is not None:
                with suppress(OSError):
                    os.truncate(self.path, size)
            raise


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of the file, apart from what is torn or not a line of a run."""
    with path.open("rb") as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and {"kind", "epoch"} <= record.keys() and type(record.get("step")) is int:
                yield record


def plain(value: Any) -> Any:
    """The value as JSON has it: no NaN, no infinity, numbers of numpy and torch as Python's."""
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if hasattr(value, "tolist"):  # numpy and torch, scalars included
        return plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def _cut_torn_line(descriptor: int) -> None:
    """A crash may have left a part of a line behind."""
    end = os.lseek(descriptor, 0, os.SEEK_END)
    size, step = end, 1 << 16
    while size > 0:
        start = max(0, size - step)
        newline = os.pread(descriptor, size - start, start).rfind(b"\n")
        if newline >= 0:
            size = start + newline + 1
            break
        size = start
    if size < end:
        os.ftruncate(descriptor, size)
