"""The folder of a run: its path, its files, its lock, and whether a run may start there. Independent of training."""

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

from ...cli.units import format_bytes
from ...config import to_tree, to_yaml
from ...data.remote.transfer import PIPE, redact_secrets
from ...errors import ConfigError, DataError
from ...files import atomic_file
from ..config import Config, upgrade

CONFIG = "config.yaml"  # the resolved config: every key with its value
METRICS = "metrics.jsonl"  # one line per measurement
SUMMARY_JSON = "summary.json"  # how the run ended
SUSPECTS = "suspects.csv"  # the samples whose labels are most likely wrong, worst first
SUMMARY_CSV = "summary.csv"  # one row per evaluated epoch
LOCK = ".lock"  # held by the process that runs the training
WANDB_ID = "wandb.id"  # id of the W&B run, which a resumed run continues

MIN_FREE_BYTES = 16 << 20  # required to start a run: the logs alone need more
_LOCK_TIMEOUT = 5.0  # seconds: a process that was just killed may take a moment to exit
_ELSEWHERE = "choose another folder with run.folder=..."

_logger = logging.getLogger("sopdist.train")


def find_run(config: Config, *, resume: bool) -> Path:
    """Return the folder of the run. Create it if necessary, and check that it is writable. For rank 0 only.

    No file in it changes: an error in the config or the data must not damage an earlier run.
    """
    if not config.run.name:
        raise ConfigError("run.name: must be set; it is the name of the run's folder")
    folder = Path(config.run.folder) / config.run.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not resume and (any((folder / name).exists() for name in (METRICS, SUMMARY_JSON)) or _has_saved(folder)):
            raise DataError(
                f"{folder} already contains a run: resume it with --resume auto, or start another with run.name=..."
            )
        free = shutil.disk_usage(folder).free
        if free < MIN_FREE_BYTES:
            raise DataError(f"{folder}: the disk is full ({format_bytes(free)} free); free some space, or {_ELSEWHERE}")
        if not os.access(folder, os.W_OK):
            raise DataError(f"{folder}: cannot be written; {_ELSEWHERE}")
    except OSError as error:
        raise _cannot_write(folder, error) from None
    return folder


def open_run(config: Config, *, resume: bool) -> Path:
    """Write the config into the folder of the run. For rank 0 only, after all other checks have passed.

    A start that failed before the first step leaves only its config behind, and does not count as a run.
    """
    folder = find_run(config, resume=resume)
    try:
        if resume:
            _warn_about_changes(folder / CONFIG, to_tree(config))
        _write_config(folder / CONFIG, config)
    except OSError as error:
        raise _cannot_write(folder, error) from None
    return folder


def lock_run(folder: Path) -> IO[str] | None:
    """Lock the folder of a run for this process: two writers at the same time would corrupt the run.

    Close the returned file to release the lock; it is also released when the process exits. Returns None if the file
    system does not support locks.
    """
    file = (folder / LOCK).open("a+")
    deadline = time.monotonic() + _LOCK_TIMEOUT
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                _logger.warning(
                    "%s: cannot be locked (%s): do not start another process on this run", folder, error.strerror
                )
                file.close()
                (folder / LOCK).unlink(missing_ok=True)  # unlocked, it would mean that no process uses the folder
                return None
        if time.monotonic() > deadline:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            file.close()
            raise DataError(
                f"{folder}: another process is already using this run: {holder}; stop it with `sopdist stop {folder}`"
            )
        time.sleep(0.2)
    file.truncate(0)
    file.write(f"pid {os.getpid()} on {socket.gethostname()}, since {time.strftime('%F %T')}\n")
    file.flush()
    return file


def _has_saved(folder: Path) -> bool:
    from ...checkpoint.folder import complete_checkpoints

    return bool(complete_checkpoints(folder))


def _cannot_write(folder: Path, error: OSError) -> DataError:
    return DataError(f"{folder}: cannot be written: {error.strerror or error}; {_ELSEWHERE}")


def shown(tree: Any) -> Any:
    """The values of a config without secrets: no passwords or tokens in URLs, no arguments of commands."""
    if isinstance(tree, dict):
        return {key: shown(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [shown(value) for value in tree]
    if not isinstance(tree, str):
        return tree
    if tree.startswith(PIPE):  # a command may contain secrets anywhere
        program = tree.removeprefix(PIPE).split(maxsplit=1)[:1]
        return f"{PIPE}{''.join(program)} ***"
    return redact_secrets(tree)


def _write_config(path: Path, config: Config) -> None:
    """Write the config with its secrets, so that it loads again. If it has any, only the owner may read the file."""
    tree = to_tree(config)
    with atomic_file(path) as file:
        if shown(tree) != tree:
            os.fchmod(file.fileno(), 0o600)
        file.write(to_yaml(config).encode())


def _warn_about_changes(path: Path, now: dict[str, Any]) -> None:
    """Warn if a run is resumed with different settings: it is allowed, but may be a mistake."""
    try:
        before = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError):
        return
    old, new = _flat(upgrade(before) if isinstance(before, dict) else before), _flat(now)
    changes = [f"{key} = {shown(new.get(key))}, was {shown(old.get(key))}" for key in new if old.get(key) != new[key]]
    if changes:
        _logger.warning("%s resumes with different settings: %s", path.parent, "; ".join(changes))


def _flat(tree: Any, where: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` -> `{"a.b": 1}`."""
    if not isinstance(tree, dict):
        return {where: tree}
    inside = (_flat(value, f"{where}.{key}" if where else str(key)) for key, value in tree.items())
    return {key: value for part in inside for key, value in part.items()}
