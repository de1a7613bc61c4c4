"""A run's double at Weights & Biases: the same numbers, never a reason for a run to fail or to wait for long.

Whatever W&B raises becomes one warning, and the run goes on without it. Keys are W&B's own affair: they are neither
read nor kept here, and neither the command line nor anything secret in the config is handed on.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..data.remote.transfer import without_secrets
from ..files import write_whole
from .run_folder import WANDB_ID, shown
from .settings import LogSettings

_logger = logging.getLogger("sopdist.train")


class WandbRun:
    """A run of W&B, on line or in the folder of the run, or nothing once it has failed."""

    def __init__(self, folder: Path, settings: LogSettings, config_tree: Mapping[str, Any], name: str) -> None:
        self._wandb: Any = None  # the package
        self._run: Any = None
        if settings.wandb == "off":
            return
        try:
            # Its reports of errors to its makers would hold our tracebacks, and wait 20 s for a server that is silent.
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
            import wandb

            self._wandb = wandb
            self._start(folder, settings, shown(dict(config_tree)), name)
        except Exception as error:
            self._give_up(error)

    def log(self, kind: str, step: int, epoch: int, metrics: Mapping[str, Any], class_names: Sequence[str]) -> None:
        """Numbers as `kind/name` over the step; numbers by class as a table."""
        if self._run is None:
            return
        try:
            values: dict[str, Any] = {"step": step, "epoch": epoch}
            for key, value in metrics.items():
                if isinstance(value, Mapping):
                    values[f"{kind}/{key}"] = self._table(value, class_names)
                elif value is not None:
                    values[f"{kind}/{key}"] = value
            self._run.log(values)
        except Exception as error:
            self._give_up(error)

    def finish(self, summary: Mapping[str, Any], *, finished: bool) -> None:
        """Hand over the summary and wait for the upload, but not for ever."""
        if self._run is None:
            return
        try:
            self._run.summary.update({key: value for key, value in summary.items() if value is not None})
            self._run.finish(exit_code=0 if finished else 1)
            self._run = None
        except Exception as error:
            self._give_up(error)

    def _start(self, folder: Path, settings: LogSettings, config: Mapping[str, Any], name: str) -> None:
        wandb = self._wandb
        quiet = wandb.Settings(silent=True)
        mode = wandb.setup(settings=quiet).settings.mode  # as the user's own W&B settings say
        if settings.wandb == "auto" and mode == "disabled":
            return
        online = settings.wandb != "offline" and wandb.login(prompt=False, verify=False)
        if settings.wandb == "online" and not online:
            _logger.warning("log.wandb = online, but W&B is not logged in (`wandb login`): it goes on offline")
        arguments = {
            "project": settings.project, "name": name, "id": _run_id(folder / WANDB_ID), "dir": str(folder),
            "config": config,
        }  # fmt: skip
        arguments["settings"] = wandb.Settings(
            silent=True,
            console="off",  # the progress bar would be written again and again
            save_code=False,
            disable_git=True,
            x_disable_meta=True,  # holds the command line, where data.root may have a password
            init_timeout=settings.wandb_timeout,
            finish_timeout=settings.wandb_timeout,
            finish_timeout_raises=True,
        )
        if online:
            try:
                self._run = wandb.init(mode="online", resume="allow", **arguments)
            except Exception as error:
                _logger.warning("W&B cannot be reached, it goes on offline: %s", _one_line(error))
                with suppress(Exception):
                    wandb.teardown()
                wandb.setup(settings=quiet)
        if self._run is None:
            self._run = wandb.init(mode="offline", **arguments)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")  # a resumed run goes back, which W&B's own count cannot

    def _table(self, columns: Mapping[str, Sequence[Any]], class_names: Sequence[str]) -> Any:
        """Numbers by class, (classes,) each, as a table with one row a class."""
        rows = list(zip(*columns.values(), strict=True))
        names = class_names if len(class_names) == len(rows) else [str(number) for number in range(len(rows))]
        return self._wandb.Table(
            columns=["class", *columns], data=[[name, *row] for name, row in zip(names, rows, strict=True)]
        )

    def _give_up(self, error: Exception) -> None:
        self._run = None
        _logger.warning("W&B has failed, the run goes on without it: %s", _one_line(error))
        if self._wandb is not None:
            with suppress(Exception):  # otherwise it would try again when the process ends
                self._wandb.teardown()


def _run_id(path: Path) -> str:
    """A resumed run has the name of the first start."""
    if not path.exists():
        write_whole(path, uuid.uuid4().hex[:8].encode())
    return path.read_text().strip()


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return without_secrets(f"{type(error).__name__}: {text}" if text else type(error).__name__)
