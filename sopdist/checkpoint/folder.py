"""The checkpoints of a run as folders: which there are, whether they are intact, which must go. Knows no tensors.

RUN/checkpoints/step-00001234/    complete if the marker, the last file to be written, is there
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from ..data.errors import DataError
from ..files import sha256_of
from .index import COMPLETE, INDEX
from .old_format import STATE, is_old
from .reading import check_sizes
from .saved import Saved, open_checkpoint

FOLDER = "checkpoints"
DAMAGED = ".damaged"  # what the name of a checkpoint ends with that was found to be damaged
LATER = ".later"  # and of one that was there when its run went back to an earlier step
_NAME = re.compile(r"step-[0-9]{8,18}")
_logger = logging.getLogger("sopdist.checkpoint")


def name_of(step: int) -> str:
    """The folder's name of a step's checkpoint."""
    return f"step-{step:08d}"


def step_of(folder: Path) -> int:
    """The step, by the folder's name."""
    return int(folder.name.removeprefix("step-"))


def complete_checkpoints(run: Path) -> list[Path]:
    """All complete checkpoints of a run, the newest last."""
    return sorted((path for path in _all(run) if is_complete(path)), key=step_of)


def is_complete(folder: Path) -> bool:
    """Whether everything was written. Not whether it still is as it was written: `verify_checkpoint` reads it all."""
    return is_old(folder) or (folder / COMPLETE).is_file()


def verify_checkpoint(
    folder: Path, part: int = 0, parts: int = 1, progress: Callable[[int], None] | None = None
) -> Saved:
    """Check sizes and checksums of all files, or of every `parts`-th one; DataError that names the first wrong one.

    `progress` is told the bytes of each file when it has been read.
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
    """Remove what saves have left behind that were not completed. Only while no save is under way."""
    partial = [path for path in (run / FOLDER).glob("step-*.partial") if path.is_dir() and not path.is_symlink()]
    for path in [*(path for path in _all(run) if not is_complete(path)), *partial]:
        _logger.info("%s: is not complete, and is removed", path)
        remove(path)


def set_aside(folder: Path) -> None:
    """Give a damaged checkpoint another name: it is not looked at any more, but somebody may want to."""
    aside = folder.with_name(folder.name + DAMAGED)
    remove(aside)
    folder.rename(aside)


def prune(run: Path, keep: int, best: int) -> None:
    """Remove the oldest complete checkpoints: the newest `keep` stay, and the one of the step `best`.

    One that cannot be removed costs a warning: the newest is saved all the same.
    """
    for folder in complete_checkpoints(run)[:-keep]:
        if step_of(folder) != best:
            try:
                remove(folder)
            except OSError as error:
                _logger.warning("%s: CANNOT BE REMOVED: %s", folder, error.strerror or error)


def forget_after(run: Path, step: int, start: Path | None = None) -> None:
    """Checkpoints of later steps than the one that a run goes on from would be taken for the newest: give them another
    name. Those of the time before are removed then, so that they do not pile up; not `start`, which is gone on from."""
    later = [folder for folder in _all(run) if step_of(folder) > step]
    if not later:
        return
    for folder in _all(run, LATER):
        if start is None or folder.resolve() != start.resolve():
            _logger.warning("%s: is of an earlier going back, and is removed", folder)
            remove(folder)
    for folder in later:
        aside = folder.with_name(folder.name + LATER)
        _logger.warning("%s: is of a later step than %s, and is renamed to %s", folder, step, aside.name)
        folder.rename(aside)


def remove(folder: Path) -> None:
    """The marker goes first: what is half removed must not look complete. Of a link only the link goes."""
    if folder.is_symlink():
        folder.unlink()
    if not folder.is_dir():
        return
    for marker in (COMPLETE, STATE):
        (folder / marker).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _all(run: Path, ending: str = "") -> Sequence[Path]:
    """Not links: what they lead to is not the run's, to take or to remove."""
    names = re.compile(_NAME.pattern + re.escape(ending))
    found = (path for path in (run / FOLDER).glob("step-*") if names.fullmatch(path.name))
    return [path for path in found if path.is_dir() and not path.is_symlink()]


def check_listing(saved: Saved) -> None:
    """Nothing is missing or cut, does not belong there, or leads elsewhere. Reads no file."""
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
    for name in sorted(name for name, plain in found.items() if not plain):
        raise DataError(f"{saved.folder / name}: is not a plain file")
    check_sizes(saved.folder, saved.index, list(saved.files))


def _sha256_of(path: Path) -> str:
    try:
        return sha256_of(path)
    except OSError as error:  # a disk that is failing
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None
