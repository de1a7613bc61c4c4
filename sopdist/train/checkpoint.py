"""Saving a run: what all ranks together know at the end of a step, written by all of them, in the background.

    RUN/checkpoints/step-00001234/                          see sopdist.checkpoint
    RUN/network-best.safetensors, network-last.safetensors  the network alone

A rank copies its share when a save begins, and trains on while the copy is written. Randomness needs no saving: order,
augmentation, dropout and the start of the noise table are functions of the seed, the step and the sample.
"""

from __future__ import annotations

import logging
import math
import time
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp

from .. import __version__
from ..checkpoint.folder import FOLDER, name_of, prune, remove
from ..checkpoint.pieces import Piece, share_out
from ..checkpoint.reading import reason_of
from ..checkpoint.tensor_file import write_tensors
from ..checkpoint.writing import CheckpointWriter, Staging, begin_save, save_pieces
from ..config import to_tree
from ..noise import SOP
from .engine import Engine
from .fingerprint import fingerprint
from .run_folder import shown
from .session import Session
from .telling import engine_name
from .world import World

BEST, LAST = "network-best.safetensors", "network-last.safetensors"
_logger = logging.getLogger("sopdist.train")


class Saver:
    """The saves of one rank, one after the other. All ranks make the same calls."""

    def __init__(self, session: Session) -> None:
        """Collective."""
        self._session = session
        self._group = session.world.new_group(of_hosts=True)  # its own: saves go on while training talks
        self._staging = Staging()
        self._under_way: Future[Any] | None = None
        self._folder, self._step = Path(), 0  # of the save under way
        self.saved_step = session.step  # the newest that is known to be saved

    def save(self) -> None:
        """Begin a checkpoint of the current step, when the one before is done. Collective. A failure is told later."""
        session, world = self._session, self._session.world
        self.wait()
        self._folder, self._step = session.folder / FOLDER / name_of(session.step), session.step
        keep, best, journal = session.config.checkpoint.keep, session.best_step, session.journal
        writer = CheckpointWriter(
            self._folder, world.rank, world.size, self._about() if world.rank == 0 else {},
            before=lambda: None if journal is None else journal.sync(),
            after=lambda: prune(session.folder, keep, best),
        )  # fmt: skip
        tally = torch.tensor([*session.tally.sums.tolist(), session.unreadable_here()], dtype=torch.float64)
        pieces = pieces_of(world, session.engine, session.objective.sop, tally)
        session.requests.saved()
        if session.config.checkpoint.async_:
            self._under_way = begin_save(pieces, writer, self._group, self._staging)
            return
        self._under_way = Future()
        try:
            save_pieces(pieces, writer, self._group)
            self._under_way.set_result(None)
        except dcp.CheckpointException as error:
            self._under_way.set_exception(error)
        self.wait()

    def look(self) -> None:
        """Take notice of a save that is done. As cheap as it must be to be called after every step."""
        if self._under_way is not None and self._under_way.done():
            self.wait()

    def wait(self) -> bool:
        """Until the save under way, if there is one, is done. False if it has failed: all ranks learn that.

        A failure costs a warning and is counted; the run goes on, and the last good checkpoint stays.
        """
        if self._under_way is None:
            return True
        under_way, self._under_way = self._under_way, None
        try:
            under_way.result()
            self.saved_step = self._step
            return True
        except dcp.CheckpointException as error:
            if any(isinstance(cause, KeyboardInterrupt) for cause, _ in error.failures.values()):
                raise KeyboardInterrupt from None  # it was no failure of the save
            self._session.failed_saves += 1
            if self._session.world.rank == 0:
                _logger.warning("COULD NOT SAVE, the run goes on: %s: %s", self._folder, reason_of(error))
                with suppress(OSError):
                    remove(self._folder)  # a full disk needs the room
            return False

    def _about(self) -> dict[str, Any]:
        session = self._session
        return {
            "step": session.step,
            "epoch": session.step / session.stream.steps,
            "best": session.best,
            "best_step": session.best_step,
            "unreadable": session.unreadable,
            "failed_saves": session.failed_saves,
            "loss_scale": session.engine.loss_scale(),
            "ranks": session.world.size,
            "engine": engine_name(session),
            "time": round(time.time(), 3),
            "versions": {"sopdist": __version__, "torch": torch.__version__},
            "fingerprint": fingerprint(session),
            "config": _sayable(shown(to_tree(session.config))),
        }


def _sayable(tree: Any) -> Any:
    """A config as JSON can say it, which has no infinity: as YAML writes it, `.inf`."""
    if isinstance(tree, dict):
        return {key: _sayable(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_sayable(value) for value in tree]
    if isinstance(tree, float) and not math.isfinite(tree):
        return ".nan" if math.isnan(tree) else ".inf" if tree > 0 else "-.inf"
    return tree


def save_network(session: Session, name: str) -> None:
    """Write the network alone, for `sopdist eval` and for use elsewhere. Collective."""
    network = session.engine.network_state()
    session.world.agree(lambda: write_tensors(session.folder / name, network) if session.world.rank == 0 else None)


def pieces_of(world: World, engine: Engine, sop: SOP | None, tally: Tensor) -> dict[str, Piece]:
    """What this rank writes of a checkpoint: its share of what all have, and what only it has. Views, not copies."""
    rank = world.rank
    pieces = share_out(engine.common_state(), rank, world.size) | engine.own_state()
    own = {f"statistics/{rank}/{name}": buffer for name, buffer in engine.statistics().items()}
    if sop is not None:
        own |= {f"noise/{rank}/{name}": column for name, column in sop.table.state_dict().items()}
    own[f"tally/{rank}"] = tally
    return pieces | {name: Piece.whole(tensor) for name, tensor in own.items()}
