"""The checkpoint folders of a run: list, verify, prune, set aside and remove them. Does not know about tensors.

RUN/checkpoints/step-00001234/    complete once the marker exists, which is the last file written
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from ..errors import DataError
from ..files import sha256_of
from .checkpoint import Checkpoint, open_checkpoint
from .index import COMPLETE, INDEX
from .old_format import STATE, is_old
from .reading import check_sizes

FOLDER = "checkpoints"
DAMAGED = ".damaged"  # suffix of a checkpoint that was found to be damaged
LATER = ".later"  # suffix of a checkpoint that was newer than the step its run went back to
_NAME = re.compile(r"step-[0-9]{8,18}")
_logger = logging.getLogger("sopdist.checkpoint")


def name_of(step: int) -> str:
    """The folder name of the checkpoint saved at a step."""
    return f"step-{step:08d}"


def step_of(folder: Path) -> int:
    """The step in the name of a checkpoint folder."""
    return int(folder.name.removeprefix("step-"))


def complete_checkpoints(run: Path) -> list[Path]:
    """All complete checkpoints of a run, newest last."""
    return sorted((path for path in _all(run) if is_complete(path)), key=step_of)


def is_complete(folder: Path) -> bool:
    """Whether the save was completed. Does not check that the files are still intact: see `verify_checkpoint`."""
    return is_old(folder) or (folder / COMPLETE).is_file()


def is_checkpoint(path: Path) -> bool:
    """Whether the path is the folder of a checkpoint, intact or not."""
    return any((path / name).is_file() for name in (INDEX, COMPLETE, STATE))


def find_checkpoint(path: Path) -> Path:
    """The checkpoint itself if `path` is one; otherwise the newest complete checkpoint of the run at `path`."""
    return find_checkpoints(path)[-1]


def find_checkpoints(path: Path) -> list[Path]:
    """The checkpoint itself if `path` is one; otherwise all complete checkpoints of the run at `path`, newest last.

    DataError if there is none.
    """
    if is_checkpoint(path):
        return [path]
    if not path.is_dir():
        raise DataError(f"{path}: no such folder")
    complete = complete_checkpoints(path)
    if not complete:
        if (path / FOLDER).is_dir():
            raise DataError(f"{path}: has no complete checkpoint")
        raise DataError(f"{path}: is not a checkpoint, and not a run that has one")
    return complete


def verify_checkpoint(
    folder: Path, part: int = 0, parts: int = 1, progress: Callable[[int], None] | None = None
) -> Checkpoint:
    """Check the sizes and checksums of all files, or of every `parts`-th file; DataError names the first bad file.

    `progress` is called with the size in bytes of each file that has been read.
    """
    saved = open_checkpoint(folder)
    check_listing(saved)
    for name, info in list(saved.index.files.items())[part::parts]:
        if info.sha256 is not None and _sha256_of(folder / name) != info.sha256:
            raise DataError(f"{folder / name}: is damaged: its checksum has changed since it was written")
        if progress is not None:
            progress(info.bytes)
    return saved


def clean(run: Path) -> None:
    """Remove the leftovers of incomplete saves. Call it only while no save is running."""
    partial = [path for path in (run / FOLDER).glob("step-*.partial") if path.is_dir() and not path.is_symlink()]
    for path in [*(path for path in _all(run) if not is_complete(path)), *partial]:
        _logger.info("%s: removing an incomplete checkpoint", path)
        remove(path)


def set_aside(folder: Path) -> None:
    """Rename a damaged checkpoint: it is not used any more, but is kept for inspection."""
    aside = folder.with_name(folder.name + DAMAGED)
    remove(aside)
    folder.rename(aside)


def prune(run: Path, keep: int, best: int) -> None:
    """Remove old complete checkpoints; keep the newest `keep` and the one saved at step `best`.

    If a checkpoint cannot be removed, this logs a warning and continues.
    """
    for folder in complete_checkpoints(run)[:-keep]:
        if step_of(folder) != best:
            try:
                remove(folder)
            except OSError as error:
                _logger.warning("%s: cannot be removed: %s", folder, error.strerror or error)


def set_aside_after(run: Path, step: int, start: Path | None = None) -> None:
    """Rename checkpoints of later steps than the one a run resumes from; they would be mistaken for the newest.

    Checkpoints that an earlier call has renamed are removed, so that they do not accumulate. `start`, the checkpoint
    that the run resumes from, is kept.
    """
    later = [folder for folder in _all(run) if step_of(folder) > step]
    if not later:
        return
    for folder in _all(run, LATER):
        if start is None or folder.resolve() != start.resolve():
            _logger.warning("removing %s, which was set aside the last time the run went back", folder)
            remove(folder)
    for folder in later:
        aside = folder.with_name(folder.name + LATER)
        _logger.warning("%s: renaming it to %s; the run resumes from the earlier step %s", folder, aside.name, step)
        folder.rename(aside)


def remove(folder: Path) -> None:
    """Remove a checkpoint, marker first, so that an interrupted removal does not look complete.

    Symbolic links are removed, but not followed.
    """
    if folder.is_symlink():
        folder.unlink()
    if not folder.is_dir():
        return
    for marker in (COMPLETE, STATE):
        (folder / marker).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def check_listing(saved: Checkpoint) -> None:
    """Check that the folder holds exactly the listed files, all of them regular and of the right size. Reads none."""
    expected = {*saved.files, *((STATE,) if saved.format == 1 else (INDEX, COMPLETE))}
    try:
        with os.scandir(saved.folder) as entries:
            found = {entry.name: entry.is_file(follow_symlinks=False) for entry in entries}
    except OSError as error:
        raise DataError(f"{saved.folder}: cannot be read: {error.strerror or error}") from None
    for name in sorted(expected - found.keys()):
        raise DataError(f"{saved.folder / name}: is missing")
    for name in sorted(found.keys() - expected):
        raise DataError(f"{saved.folder / name}: does not belong to the checkpoint; remove it if you know what it is")
    for name in sorted(name for name, regular in found.items() if not regular):
        raise DataError(f"{saved.folder / name}: is not a regular file")
    check_sizes(saved.folder, saved.index, list(saved.files))


def _all(run: Path, suffix: str = "") -> Sequence[Path]:
    """Checkpoint folders of a run, complete or not. Leaves out links: their targets do not belong to the run."""
    names = re.compile(_NAME.pattern + re.escape(suffix))
    found = (path for path in (run / FOLDER).glob("step-*") if names.fullmatch(path.name))
    return [path for path in found if path.is_dir() and not path.is_symlink()]


def _sha256_of(path: Path) -> str:
    try:
        return sha256_of(path)
    except OSError as error:  # e.g. a failing disk
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None
