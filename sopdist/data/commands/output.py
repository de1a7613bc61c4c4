"""What commands write besides text: files that a user asked for, and the bar that shows how far they are."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ...files import write_whole
from ..errors import DataError


@contextmanager
def cannot_write(path: Path) -> Iterator[None]:
    """A full or read-only disk is for the user to know, not a bug."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror or error}") from None


def write_output(path: Path, content: bytes) -> None:
    """Write the file whole or not at all."""
    with cannot_write(path):
        write_whole(path, content)


def write_json(path: Path, content: Any) -> None:
    """Write readable JSON, in ASCII: names may hold what UTF-8 does not."""
    write_output(path, (json.dumps(content, indent=1) + "\n").encode())


def progress_bar(**options: Any) -> tqdm[Any]:
    """A bar on stderr; in a log file it writes a line every half minute instead of ten a second."""
    interval = 0.1 if sys.stderr.isatty() else 30.0
    return tqdm(mininterval=interval, maxinterval=max(10.0, interval), **options)
