"""Saving a run: the state of all ranks at the end of a step, written by all of them, in the background.

    RUN/checkpoints/step-00001234/                          see sopdist.checkpoint
    RUN/network-best.safetensors, network-last.safetensors  the network alone
    RUN/network-last-ema.safetensors                        the moving average of its weights, with train.ema

A rank copies its share when a save starts, and keeps training while the copy is written. Random state is not saved:
order, augmentation, dropout and the initial tables are functions of the seed, the step and the sample.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as dcp

from ... import __version__
from ...checkpoint.folder import FOLDER, name_of, prune, remove
from ...checkpoint.fragments import Fragment, distribute
from ...checkpoint.reading import reason_of
from ...checkpoint.tensor_file import write_tensors
from ...checkpoint.writing import CheckpointWriter, Staging, save_fragments, start_save
from ...config import to_tree
from ..distributed.world import CollectiveError
from ..progress import Progress
from ..record.reporter import Reporter
from ..record.run_folder import shown
from ..session import Session
from .sections import Content, sections_of

BEST, LAST = "network-best.safetensors", "network-last.safetensors"
LAST_AVERAGE = "network-last-ema.safetensors"
_logger = logging.getLogger("sopdist.train")


class Saver:
    """The saves of one rank, one after the other. All ranks make the same calls."""

    def __init__(self, session: Session, progress: Progress, reporter: Reporter) -> None:
        """Collective."""
        self._session, self._progress, self._reporter = session, progress, reporter
        world = session.world
        self._sections = sections_of(session, progress, reporter)
        self._group = world.new_group(for_cpu=True)  # its own: saves continue while training communicates
        self._staging = Staging()
        self._save: Future[Any] | None = None  # in progress
        self._folder, self._step = Path(), 0  # of that save
        self.saved_step = progress.step  # the newest that is known to be saved

    def save(self) -> None:
        """Start a checkpoint of the current step, when the previous one is done. Collective.

        A failure is reported later, by `poll` or `wait`. Nothing is saved while samples are not finite: a
        diverging network is not a useful state to resume from.
        """
        session, progress, world = self._session, self._progress, self._session.world
        if progress.nonfinite_streak:
            if world.rank == 0:
                _logger.warning("step %s: no checkpoint saved, because the loss is not finite", progress.step)
            return
        with self._reporter.clock.part("checkpoint"):
            self.wait()
            self._folder, self._step = session.folder / FOLDER / name_of(progress.step), progress.step
            keep, best, run_log = session.config.checkpoint.keep, progress.best_step, self._reporter.run_log
            contents = [section.save() for section in self._sections]
            writer = CheckpointWriter(
                self._folder, world.rank, world.size, self._about(contents) if world.rank == 0 else {},
                before=lambda: None if run_log is None else run_log.sync(),
                after=lambda: prune(session.folder, keep, best),
            )  # fmt: skip
            fragments = fragments_of(contents, world.rank, world.size)
            session.requests.saved()
            if session.config.checkpoint.async_:
                self._save = start_save(fragments, writer, self._group, self._staging)
                return
            self._save = Future()
            try:
                save_fragments(fragments, writer, self._group)
                self._save.set_result(None)
            except dcp.CheckpointException as error:
                self._save.set_exception(error)
            self.wait()

    def poll(self) -> None:
        """Check whether the save in progress is done. Cheap: called after every step."""
        if self._save is not None and self._save.done():
            self.wait()

    def wait(self) -> bool:
        """Wait until the save in progress is done. False, on every rank, if it has failed.

        A failure is logged and counted; the run continues, and the last good checkpoint is kept.
        """
        if self._save is None:
            return True
        save, self._save = self._save, None
        try:
            with self._reporter.clock.part("checkpoint"):
                save.result()
            self.saved_step = self._step
            return True
        except dcp.CheckpointException as error:
            if any(isinstance(cause, KeyboardInterrupt) for cause, _ in error.failures.values()):
                raise KeyboardInterrupt from None  # not a failure of the save
            self._failed(f"{self._folder}: {reason_of(error)}")
            if self._session.world.rank == 0:
                with suppress(OSError):
                    remove(self._folder)  # on a full disk, the next save needs the space
            return False

    def save_last(self) -> bool:
        """Write the network after the last step, and the average of its weights if there is one. False if it failed."""
        if not self.save_network(LAST):
            return False
        if self._session.average is None:
            return True
        with self._session.average.in_use():
            return self.save_network(LAST_AVERAGE)

    def save_network(self, name: str) -> bool:
        """Write only the network, for `sopdist eval` and for use elsewhere. Collective. False if that failed."""
        world, path = self._session.world, self._session.folder / name
        with self._reporter.clock.part("checkpoint"):
            network = self._session.engine.network_state()
            try:
                world.on_all_ranks(lambda: write_tensors(path, network) if world.rank == 0 else None)
                return True
            except CollectiveError as error:
                self._failed(str(error))
                return False

    def _failed(self, reason: str) -> None:
        self._progress.failed_saves += 1
        if self._session.world.rank == 0:
            _logger.warning("checkpoint could not be saved; training continues: %s", reason)

    def _about(self, contents: Sequence[Content]) -> dict[str, Any]:
        session = self._session
        about = {key: value for content in contents for key, value in content.about.items()}
        return about | {
            "epoch": self._progress.step / session.stream.steps,
            "ranks": session.world.size,
            "engine": session.engine_name,
            "time": round(time.time(), 3),
            "versions": {"sopdist": __version__, "torch": torch.__version__},
            "fingerprint": session.fingerprint,
            "config": _json_safe(shown(to_tree(session.config))),
        }


def fragments_of(contents: Sequence[Content], rank: int, ranks: int) -> dict[str, Fragment]:
    """The part of a checkpoint that this rank writes: its share of the replicated state, and all of its own state."""
    replicated = {name: tensor for content in contents for name, tensor in content.replicated.items()}
    own = {name: fragment for content in contents for name, fragment in content.own.items()}
    return distribute(replicated, rank, ranks) | own


def _json_safe(tree: Any) -> Any:
    """A config for JSON, which has no infinity: as YAML writes it, `.inf`."""
    if isinstance(tree, dict):
        return {key: _json_safe(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_json_safe(value) for value in tree]
    if isinstance(tree, float) and not math.isfinite(tree):
        return ".nan" if math.isnan(tree) else ".inf" if tree > 0 else "-.inf"
    return tree
