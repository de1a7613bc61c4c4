"""Logging to Weights & Biases. It never makes a run fail or wait for long.

If W&B raises an error, the run logs one warning and continues without W&B. W&B handles its own API keys; they are not
read or stored here. The command line and secrets in the config are not sent.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...data.remote.transfer import redact_secrets
from ...files import write_atomic
from ..settings import LogSettings
from .run_folder import WANDB_ID, shown

_logger = logging.getLogger("sopdist.train")


class WandbRun:
    """A W&B run, online, or offline in the folder of the run. Does nothing after an error."""

    def __init__(self, folder: Path, settings: LogSettings, config_tree: Mapping[str, Any], name: str) -> None:
        self._wandb: Any = None  # the package
        self._run: Any = None
        if settings.wandb == "off":
            return
        try:
            # W&B's own error reports would contain our tracebacks, and wait 20 s for a server that does not answer.
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
            import wandb

            self._wandb = wandb
            self._start(folder, settings, shown(dict(config_tree)), name)
        except Exception as error:
            self._give_up(error)

    def log(self, kind: str, step: int, epoch: int, metrics: Mapping[str, Any], class_names: Sequence[str]) -> None:
        """Log metrics as `kind/name` against the step, and metrics per class as a table."""
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
        """Send the summary, and wait for the upload for at most `log.wandb_timeout`."""
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
        mode = wandb.setup(settings=quiet).settings.mode  # from the user's W&B settings
        if settings.wandb == "auto" and mode == "disabled":
            return
        online = settings.wandb != "offline" and wandb.login(prompt=False, verify=False)
        if settings.wandb == "online" and not online:
            _logger.warning("log.wandb = online, but W&B is not logged in (`wandb login`): logging offline")
        arguments = {
            "project": settings.project, "name": name, "id": _run_id(folder / WANDB_ID), "dir": str(folder),
            "config": config,
        }  # fmt: skip
        arguments["settings"] = wandb.Settings(
            silent=True,
            console="off",  # it would log every update of the progress bar
            save_code=False,
            disable_git=True,
            x_disable_meta=True,  # metadata include the command line, where data.root may contain a password
            init_timeout=settings.wandb_timeout,
            finish_timeout=settings.wandb_timeout,
            finish_timeout_raises=True,
        )
        if online:
            try:
                self._run = wandb.init(mode="online", resume="allow", **arguments)
            except Exception as error:
                _logger.warning("W&B cannot be reached, logging offline: %s", _one_line(error))
                with suppress(Exception):
                    wandb.teardown()
                wandb.setup(settings=quiet)
        if self._run is None:
            self._run = wandb.init(mode="offline", **arguments)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")  # a resumed run rewinds, which W&B's own step cannot

    def _table(self, columns: Mapping[str, Sequence[Any]], class_names: Sequence[str]) -> Any:
        """Metrics per class, (classes,) each, as a table with one row per class."""
        rows = list(zip(*columns.values(), strict=True))
        names = class_names if len(class_names) == len(rows) else [str(index) for index in range(len(rows))]
        return self._wandb.Table(
            columns=["class", *columns], data=[[name, *row] for name, row in zip(names, rows, strict=True)]
        )

    def _give_up(self, error: Exception) -> None:
        self._run = None
        _logger.warning("W&B failed, the run continues without it: %s", _one_line(error))
        if self._wandb is not None:
            with suppress(Exception):  # otherwise it would retry when the process exits
                self._wandb.teardown()


def _run_id(path: Path) -> str:
    """Return the W&B id of the run. A resumed run keeps that of its first start."""
    if not path.exists():
        write_atomic(path, uuid.uuid4().hex[:8].encode())
    return path.read_text().strip()


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return redact_secrets(f"{type(error).__name__}: {text}" if text else type(error).__name__)
