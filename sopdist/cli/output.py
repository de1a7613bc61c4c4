"""Output files and progress bars of commands."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..errors import DataError
from ..files import write_atomic


@contextmanager
def cannot_write(path: Path) -> Iterator[None]:
    """Turn an OSError (full disk, read-only file system) into a DataError that names `path`."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror or error}") from None


def write_output(path: Path, content: bytes) -> None:
    """Write the file atomically."""
    with cannot_write(path):
        write_atomic(path, content)


def write_json(path: Path, content: Any) -> None:
    """Write indented JSON, in ASCII: file names may contain bytes that are not UTF-8."""
    write_output(path, (json.dumps(content, indent=1) + "\n").encode())


def progress_bar(**options: Any) -> tqdm[Any]:
    """A progress bar on stderr. It updates ten times per second in a terminal, and every 30 s in a log file."""
    interval = 0.1 if sys.stderr.isatty() else 30.0
    return tqdm(mininterval=interval, maxinterval=max(10.0, interval), **options)
