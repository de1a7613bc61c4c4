"""Ask a run to save and to stop after the step that it is at; `--resume auto` goes on with it.

  sopdist stop runs/cifar10
  sopdist stop --cfg cifar10 run.name=sixty          the run that `sopdist train` with the same options has begun

It puts a file STOP into the run's folder, which the run finds within seconds. All ranks then end with code 75.

exit codes: 0 asked, or the run is finished already; 1 there is no such run, or it is not running; 2 config
"""

from __future__ import annotations

import argparse
import fcntl
from pathlib import Path

from ...data.errors import DataError
from ..ending import FINISHED, ending_of
from ..preemption import STOP

# As run_folder calls them, which would load torch: somebody may have seconds left.
SUMMARY, LOCK = "summary.json", ".lock"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `sopdist stop`."""
    parser.intermixed = True  # type: ignore[attr-defined]
    parser.add_argument("--cfg", metavar="NAME_OR_PATH", help="the config of the run, instead of its folder")
    parser.add_argument("--where", action="store_true", help="only print the run's folder, whether there is one or not")
    what = "the folder of the run; after --cfg, keys of the config as they were changed for the run"
    parser.add_argument("words", nargs="*", metavar="RUN | key=value", help=what)


def run(args: argparse.Namespace) -> int:
    """Ask; returns the exit code."""
    folder = _folder(args.cfg, args.words)
    print(folder if args.where else ask_to_stop(folder))
    return 0


def ask_to_stop(folder: Path) -> str:
    """Put the file there, if the run is running; what is to be told. DataError if there is nothing to stop."""
    if not folder.is_dir():
        raise DataError(f"{folder}: no such run; runs are folders in run.folder, called run.name")
    ending = ending_of(folder / SUMMARY)
    if ending == FINISHED:
        return f"{folder} is finished already: nothing to do"
    if ending != "running":
        raise DataError(f"{folder} is not running: it ended as {ending!r}; sopdist train --resume auto goes on with it")
    if _is_forsaken(folder / LOCK):
        raise DataError(
            f"{folder} is not running: who worked on it has gone without a word; sopdist train --resume auto goes on "
            f"with it. (On a drive without locks this may be wrong: then put a file {STOP} into the folder)"
        )
    try:
        (folder / STOP).touch()
    except OSError as error:
        raise DataError(f"{folder / STOP}: cannot be written: {error.strerror or error}") from None
    return f"{folder} is asked to save and to stop after its next step"


def _is_forsaken(lock: Path) -> bool:
    """Whether a run has begun there, and no process holds its lock any more."""
    try:
        with lock.open("r+") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:  # there is none, or somebody has it, or locks are not known
        return False


def _folder(cfg: str | None, words: list[str]) -> Path:
    if cfg is None:
        if len(words) != 1:
            from ...config import ConfigError

            raise ConfigError("which run? Give its folder, or --cfg and key=value as for `sopdist train`")
        return Path(words[0])
    from ..config import load

    config = load(cfg, words)
    return Path(config.run.folder) / config.run.name
