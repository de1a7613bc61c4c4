"""Read all files of a checkpoint, or of all complete ones of a run, and compare them with their checksums.

exit codes: 0 all intact, 1 one is damaged, and its file is named
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ...data.commands.output import progress_bar
from ...data.errors import DataError
from ..folder import verify_checkpoint
from ..saved import open_checkpoint
from .finding import find_all
from .sizes import counted, size_text

_LARGE = 1 << 30  # bytes from which on a bar is shown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `sopdist checkpoint verify`."""
    about = "folder of a checkpoint, or of a run: all of its complete ones"
    parser.add_argument("folder", metavar="CHECKPOINT_OR_RUN", type=Path, help=about)


def run(args: argparse.Namespace) -> int:
    """Verify; returns the exit code."""
    folders = find_all(args.folder)
    total = sum(_bytes_of(folder) for folder in folders)
    damaged = 0
    with progress_bar(total=total, unit="B", unit_scale=True, disable=total < _LARGE, leave=False) as bar:

        def advance(count: int) -> None:
            bar.update(count)

        for folder in folders:
            try:
                saved = verify_checkpoint(folder, progress=advance)
            except (DataError, OSError) as error:
                if not folder.exists():
                    continue  # a run that goes on has removed it: it keeps only the newest
                told = str(error) if isinstance(error, DataError) else f"{error.filename}: {error.strerror}"
                bar.write(f"DAMAGED {told}")
                damaged += 1
                continue
            size = f"{size_text(sum(saved.files.values()))} in {counted(len(saved.files), 'file')}"
            what = "intact" if saved.format > 1 else "can be opened; format 1 has no checksums, so no more is known"
            bar.write(f"{folder}: {what}, {size}")
    return 1 if damaged else 0


def _bytes_of(folder: Path) -> int:
    """By its index; what is wrong with that is told later."""
    try:
        return sum(open_checkpoint(folder).files.values())
    except (DataError, OSError):
        return 0
