"""The folder of a run: its name, what is in it, and whether a run may begin there. It knows files, not training."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import socket
import time
from pathlib import Path
from typing import IO, Any

import yaml

from ..config import ConfigError, to_tree, to_yaml
from ..data.errors import DataError
from ..data.remote.transfer import PIPE, without_secrets
from ..files import whole_file
from .config import Config

CONFIG = "config.yaml"  # resolved: every key with its value
METRICS = "metrics.jsonl"  # one line each time something was measured
SUMMARY_JSON = "summary.json"  # how the run ended
SUSPECTS = "suspects.csv"  # the samples whose labels are most likely wrong, the worst first
SUMMARY_CSV = "summary.csv"  # a row for each evaluated epoch
LOCK = ".lock"  # held by the process that works on the run
WANDB_ID = "wandb.id"  # which run of W&B this is, so that a resumed run goes on there

LEAST_FREE = 16 << 20  # bytes without which no run begins: logs alone need more
_PATIENCE = 5.0  # seconds to wait for a run's lock
_ELSEWHERE = "run.folder=... chooses another place"

_logger = logging.getLogger("sopdist.train")


def find_run(config: Config, *, resume: bool) -> Path:
    """The folder of a run, which is made if it is not there, and can be written. For rank 0 only.

    Nothing in it is touched: what is wrong with the config or the data shall not cost an older run.
    """
    if not config.run.name:
        raise ConfigError("run.name: must be set: it names the folder of the run")
    folder = Path(config.run.folder) / config.run.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not resume and (any((folder / name).exists() for name in (METRICS, SUMMARY_JSON)) or _has_saved(folder)):
            raise DataError(
                f"{folder} holds a run already: --resume auto goes on with it, run.name=... starts another one"
            )
        free = shutil.disk_usage(folder).free
        if free < LEAST_FREE:
            raise DataError(f"{folder}: its disk is full, {free >> 20} MiB are free; free some space, or {_ELSEWHERE}")
        if not os.access(folder, os.W_OK):
            raise DataError(f"{folder}: cannot be written; {_ELSEWHERE}")
    except OSError as error:
        raise _cannot_write(folder, error) from None
    return folder


def open_run(config: Config, *, resume: bool) -> Path:
    """Put the config into the folder of the run. For rank 0 only, when all else has been found to be right.

    A start that failed before the first step has left only its config behind, and does not count as a run.
    """
    folder = find_run(config, resume=resume)
    try:
        if resume:
            _tell_changes(folder / CONFIG, to_tree(config))
        _write_config(folder / CONFIG, config)
    except OSError as error:
        raise _cannot_write(folder, error) from None
    return folder


def lock_run(folder: Path) -> IO[str] | None:
    """Claim a run's folder for this process: two that write there at the same time would destroy each other's work.

    To be closed at the end; it ends with the process in any case. None where the drive knows no locks.
    """
    file = (folder / LOCK).open("a+")
    until = time.monotonic() + _PATIENCE  # a process that was just killed may take a moment to go
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                _logger.warning("%s: cannot be locked (%s): let no other process work on it", folder, error.strerror)
                file.close()
                (folder / LOCK).unlink(missing_ok=True)  # it would say that nobody works there
                return None
        if time.monotonic() > until:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            file.close()
            raise DataError(f"{folder}: another process works on this run: {holder}; `sopdist stop {folder}` ends it")
        time.sleep(0.2)
    file.truncate(0)
    file.write(f"pid {os.getpid()} on {socket.gethostname()}, since {time.strftime('%F %T')}\n")
    file.flush()
    return file


def _has_saved(folder: Path) -> bool:
    from ..checkpoint.folder import complete_checkpoints

    return bool(complete_checkpoints(folder))


def _cannot_write(folder: Path, error: OSError) -> DataError:
    return DataError(f"{folder}: cannot be written: {error.strerror or error}; {_ELSEWHERE}")


def shown(tree: Any) -> Any:
    """The values of a config as anybody may see them: URLs without passwords and tokens, commands by their program."""
    if isinstance(tree, dict):
        return {key: shown(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [shown(value) for value in tree]
    if not isinstance(tree, str):
        return tree
    if tree.startswith(PIPE):  # a command may carry secrets anywhere
        program = tree.removeprefix(PIPE).split(maxsplit=1)[:1]
        return f"{PIPE}{''.join(program)} ***"
    return without_secrets(tree)


def _write_config(path: Path, config: Config) -> None:
    """It must load again, so it keeps its secrets; a file that has some is for its owner only."""
    tree = to_tree(config)
    with whole_file(path) as file:
        if shown(tree) != tree:
            os.fchmod(file.fileno(), 0o600)
        file.write(to_yaml(config).encode())


def _tell_changes(path: Path, now: dict[str, Any]) -> None:
    """A run may be resumed with other settings, but not by accident."""
    try:
        before = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError):
        return
    old, new = _flat(before), _flat(now)
    changes = [f"{key} = {shown(new.get(key))}, was {shown(old.get(key))}" for key in new if old.get(key) != new[key]]
    if changes:
        _logger.warning("%s goes on with other settings: %s", path.parent, "; ".join(changes))


def _flat(tree: Any, where: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` -> `{"a.b": 1}`."""
    if not isinstance(tree, dict):
        return {where: tree}
    inside = (_flat(value, f"{where}.{key}" if where else str(key)) for key, value in tree.items())
    return {key: value for part in inside for key, value in part.items()}
