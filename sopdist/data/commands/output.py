"""Files that a user asked a command to write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...files import write_whole
from ..errors import DataError


def write_output(path: Path, content: bytes) -> None:
    """Write the file whole or not at all; a reason why not is for the user, not a bug."""
    try:
        write_whole(path, content)
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror}") from None


def write_json(path: Path, content: Any) -> None:
    """Write readable JSON."""
    write_output(path, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())
