"""The folder of the demo: made by it, known again by it, and never somebody else's. It knows no training."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from ..data.commands.output import cannot_write
from ..data.errors import DataError
from ..files import write_whole

MARK = ".gitignore"  # keeps the demo out of the repository it was started in, and says whose folder this is
_TEXT = "# Made by `sopdist demo`, which replaces its runs in here.\n*\n"


def open_folder(out: Path, runs: Sequence[str]) -> Path:
    """The folder with its absolute path, without these runs of an earlier demo. Shards stay."""
    folder = out.resolve()
    with cannot_write(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not _is_ours(folder) and any(folder.iterdir()):
            raise DataError(f"--out {out}: holds other things; name a new folder, or one that a demo has made")
        write_whole(folder / MARK, _TEXT.encode())
        for name in runs:
            if (folder / "runs" / name).exists():
                shutil.rmtree(folder / "runs" / name)
    return folder


def _is_ours(folder: Path) -> bool:
    mark = folder / MARK
    return mark.is_file() and mark.read_text(errors="replace") == _TEXT
