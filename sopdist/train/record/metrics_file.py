"""`metrics.jsonl`: one JSON object per line, written immediately. Independent of what the metrics mean.

A crash loses at most the line that is being written. If the disk is full, lines wait until there is space.
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

from ...errors import DataError
from ...files import atomic_file

_MAX_WAITING = 10_000  # lines kept in memory while the disk is full

_logger = logging.getLogger("sopdist.train")


class MetricsFile:
    """Appends lines to a file, which may already exist."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting: deque[bytes] = deque(maxlen=_MAX_WAITING)
        self._failed = False
        try:
            with path.open("ab+") as file:
                _truncate_incomplete_line(file.fileno())
        except OSError as error:
            raise DataError(f"{path}: cannot be written: {error.strerror or error}") from None

    def add(self, record: Mapping[str, Any]) -> None:
        """Write a line. If that fails, warn and retry with the next line."""
        self._waiting.append(json.dumps(plain(record), allow_nan=False).encode() + b"\n")
        try:
            self._write(b"".join(self._waiting))
        except OSError as error:
            if not self._failed:
                reason = error.strerror or error
                _logger.warning("%s: cannot be written: %s; the run continues and will retry", self.path, reason)
            self._failed = True
            return
        self._waiting.clear()
        if self._failed:
            _logger.warning("%s: can be written again", self.path)
        self._failed = False

    def sync(self) -> None:
        """Flush the file to disk (fsync), so that it survives a power failure.

        OSError if some lines could not be written yet. May be called from another thread than `add`.
        """
        if self._failed:  # not `_waiting`, which also holds a line that is just being written
            raise OSError(f"{self.path}: lines could not be written yet")
        with self.path.open("rb") as file:
            os.fsync(file.fileno())

    def rewind(self, step: int) -> None:
        """Drop the lines after a step, which will be written again."""
        kept = [record for record in read_lines(self.path) if record["step"] <= step]
        try:
            with atomic_file(self.path) as file:
                for record in kept:
                    file.write(json.dumps(record).encode() + b"\n")
        except OSError as error:
            raise DataError(f"{self.path}: cannot be written: {error.strerror or error}") from None

    def _write(self, content: bytes) -> None:
        """Append all of `content` or nothing. Reopens the file: a network drive may report on close that it is full."""
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
    """Yield the records of the file. Skip incomplete lines, and lines that are no metrics."""
    with path.open("rb") as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and {"kind", "epoch"} <= record.keys() and type(record.get("step")) is int:
                yield record


def plain(value: Any) -> Any:
    """Convert a value for JSON: NumPy and torch values become Python numbers, NaN and infinity become None."""
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if hasattr(value, "tolist"):  # numpy and torch, scalars included
        return plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def _truncate_incomplete_line(descriptor: int) -> None:
    """Remove the incomplete last line that a crash may have left."""
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
