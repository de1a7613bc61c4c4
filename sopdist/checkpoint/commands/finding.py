"""From what a user names to checkpoints: the folder of one, or of a run, whose newest complete one is meant."""

from __future__ import annotations

from pathlib import Path

from ...data.errors import DataError
from ..folder import FOLDER, complete_checkpoints, is_complete, name_of
from ..index import COMPLETE, INDEX
from ..old_format import STATE
from ..saved import open_checkpoint

WHICH = "folder of a checkpoint, or of a run: its newest one"


def is_checkpoint(path: Path) -> bool:
    """Whether it is the folder of a checkpoint, intact or not."""
    return any((path / name).is_file() for name in (INDEX, COMPLETE, STATE))


def find_one(path: Path) -> Path:
    """The checkpoint that is meant."""
    return path if is_checkpoint(path) else find_all(path)[-1]


def find_best(path: Path) -> Path:
    """Of a run, the checkpoint of its best network so far."""
    newest = open_checkpoint(find_one(path))
    step = int(newest.index.about.get("best_step", -1))
    best = newest.folder.with_name(name_of(step))
    if step < 0:
        raise DataError(
            f"{path}: has no best network: no split was named to choose it by (`val`, or evaluate.best), "
            f"or it is of format 1; leave --best out"
        )
    if not is_complete(best):
        raise DataError(
            f"{path}: its best network is of step {step:,}, of which there is no checkpoint; leave --best out"
        )
    return best


def find_all(path: Path) -> list[Path]:
    """The checkpoint, or all complete ones of a run, the newest last; at least one."""
    if is_checkpoint(path):
        return [path]
    if not path.is_dir():
        raise DataError(f"{path}: no such folder")
    complete = complete_checkpoints(path)
    if not complete:
        why = "has no complete checkpoint" if (path / FOLDER).is_dir() else "is neither a checkpoint nor a run with one"
        raise DataError(f"{path}: {why}")
    return complete
