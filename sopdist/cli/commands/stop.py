"""Ask a run to save a checkpoint and stop after its current step; `--resume auto` continues it.

  sopdist stop runs/cifar10
  sopdist stop --cfg cifar10 run.name=sixty          the run that `sopdist train` started with the same options

It creates a file STOP in the run's folder, which the run notices within seconds. All ranks then exit with code 75.

exit codes: 0 asked, or the run has already finished; 1 there is no such run, or it is not running; 2 config
"""

from __future__ import annotations

import argparse
import fcntl
from pathlib import Path

from ...errors import DataError
from ...train.distributed.stop_requests import STOP
from ...train.record.exit_status import FINISHED, read_exit_status

# Same as in run_folder, which would import torch: this command must be fast, since a job may have only seconds left.
SUMMARY, LOCK = "summary.json", ".lock"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `sopdist stop`."""
    parser.intermixed = True  # type: ignore[attr-defined]
    parser.add_argument("--cfg", metavar="NAME_OR_PATH", help="the config of the run, instead of its folder")
    parser.add_argument("--where", action="store_true", help="only print the run's folder, whether it exists or not")
    about = "folder of the run; with --cfg, the config overrides that the run was started with"
    parser.add_argument("words", nargs="*", metavar="RUN | key=value", help=about)


def run(args: argparse.Namespace) -> int:
    """Ask the run to stop; returns the exit code."""
    folder = _folder(args.cfg, args.words)
    print(folder if args.where else ask_to_stop(folder))
    return 0


def ask_to_stop(folder: Path) -> str:
    """Create the file STOP if the run is running. Returns a message; DataError if there is nothing to stop."""
    if not folder.is_dir():
        raise DataError(f"{folder}: no such run; a run is the folder run.name inside run.folder")
    status = read_exit_status(folder / SUMMARY)
    if status == FINISHED:
        return f"{folder} has already finished: nothing to do"
    if status != "running":
        raise DataError(
            f"{folder} is not running: its exit status is {status!r}; resume it with sopdist train --resume auto"
        )
    if _is_unlocked(folder / LOCK):
        raise DataError(
            f"{folder} is not running: its process has died; resume it with sopdist train --resume auto. (If "
            f"the file system does not support locks, this may be wrong: create a file {STOP} in the folder then)"
        )
    try:
        (folder / STOP).touch()
    except OSError as error:
        raise DataError(f"{folder / STOP}: cannot be written: {error.strerror or error}") from None
    return f"{folder}: asked to save and stop after its next step"


def _is_unlocked(lock: Path) -> bool:
    """Whether the lock file exists and no process holds the lock."""
    try:
        with lock.open("r+") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:  # no such file, locked by another process, or locks are not supported
        return False


def _folder(cfg: str | None, words: list[str]) -> Path:
    if cfg is None:
        if len(words) != 1:
            from ...errors import ConfigError

            raise ConfigError("which run? Give its folder, or --cfg and key=value as for `sopdist train`")
        return Path(words[0])
    from ...train.config import load

    config = load(cfg, words)
    return Path(config.run.folder) / config.run.name
