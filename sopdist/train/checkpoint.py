"""Checkpoints: what a run needs to go on, at the end of epochs, for every engine and any number of ranks.

    RUN/checkpoints/step-00001234/
        network.safetensors  optimizer.safetensors    whole tensors by name, the same for every engine
        noise-0-of-2.safetensors ...                  each rank's rows of the noise table
        state.json                                    step, best so far, and the fingerprint of the run
    RUN/network-best.safetensors, network-last.safetensors

A checkpoint is written under another name and renamed when all ranks are done: a folder of that name is complete.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from .. import __version__
from ..data import plan
from ..data.errors import DataError
from ..files import write_whole
from ..noise.dealing import deal
from .run_folder import METRICS
from .session import Session
from .world import TogetherError

FORMAT = 1
FOLDER, STATE = "checkpoints", "state.json"
NETWORK, OPTIMIZER = "network.safetensors", "optimizer.safetensors"
BEST, LAST = "network-best.safetensors", "network-last.safetensors"


def save_checkpoint(session: Session) -> None:
    """Write a checkpoint of the current step, then remove the oldest. Collective. A failure is told, not raised."""
    name = _name_of(session.step)
    partial, final = (session.folder / FOLDER / each for each in (f"{name}.partial", name))
    network, optimizer = session.engine.network_state(), session.engine.optimizer_state()

    def write() -> None:
        if session.world.rank == 0:
            write_tensors(partial / NETWORK, network)
            write_tensors(partial / OPTIMIZER, optimizer)
            write_whole(partial / STATE, (json.dumps(_state_of(session), indent=1) + "\n").encode())
        if session.objective.sop is not None:
            rows = f"noise-{session.world.rank}-of-{session.world.size}.safetensors"
            write_tensors(partial / rows, session.objective.sop.table.state_dict())

    def commit() -> None:
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        complete = complete_checkpoints(session.folder)
        for old in complete[: -session.config.checkpoint.keep]:
            shutil.rmtree(old, ignore_errors=True)

    session.world.on_first(lambda: _fresh(partial))
    session.world.agree(write)
    session.world.on_first(commit)


def save_network(session: Session, name: str) -> None:
    """Write the network alone, for `sopdist eval` and for use elsewhere. Collective."""
    network = session.engine.network_state()
    session.world.on_first(lambda: write_tensors(session.folder / name, network))


def load_checkpoint(session: Session, folder: Path) -> None:
    """Go on from a checkpoint. Collective; refuses one of another run, and says what differs."""
    state = session.world.agree(lambda: _read_state(folder))
    session.world.agree(lambda: _compare(folder, state["fingerprint"], fingerprint(session)))
    network = session.world.agree(lambda: read_tensors(folder / NETWORK))
    optimizer = session.world.agree(lambda: read_tensors(folder / OPTIMIZER))
    try:  # these talk to other ranks themselves, and what is wrong with a file is wrong for all of them
        session.engine.load_network_state(network)
        session.engine.load_optimizer_state(optimizer)
    except DataError as error:
        raise TogetherError(f"{folder}: {error}") from None
    session.world.agree(lambda: _load_rows(session, folder))
    session.step, session.best = state["step"], state["best"]


def forget_later(session: Session) -> None:
    """Remove checkpoints of later steps than the one that the run goes on from: they would be taken for the newest.

    Collective.
    """

    def remove() -> None:
        for later in complete_checkpoints(session.folder):
            if later.name > _name_of(session.step):
                shutil.rmtree(later)

    session.world.on_first(remove)


def _name_of(step: int) -> str:
    return f"step-{step:08d}"


def find_checkpoint(run: Path, resume: str) -> Path | None:
    """The checkpoint that `--resume` means: `auto` is the newest of the run, if there is one."""
    if resume == "none":
        return None
    if resume == "auto":
        complete = complete_checkpoints(run)
        return complete[-1] if complete else None
    path = Path(resume)
    complete = [path] if (path / STATE).is_file() else complete_checkpoints(path)
    if not complete:
        raise DataError(f"--resume {resume}: neither a checkpoint nor a run with one")
    if (run / METRICS).exists() and complete[-1].resolve().parent.parent != run.resolve():
        raise DataError(
            f"--resume {resume}: is of another run, and {run} holds one already: run.name=... names a new one"
        )
    return complete[-1]


def complete_checkpoints(run: Path) -> list[Path]:
    """All complete checkpoints of a run, the newest last."""
    return sorted(path.parent for path in (run / FOLDER).glob(f"step-????????/{STATE}"))


def fingerprint(session: Session) -> dict[str, Any]:
    """What must be the same for a checkpoint to go on as if nothing had happened."""
    config, stream = session.config, session.stream
    labels = np.ascontiguousarray(stream.labels.labels)
    found = {
        "samples": len(stream.split),
        "classes": len(stream.split.manifest.classes),
        "shards": stream.split.manifest.digest,
        "labels": hashlib.sha256(labels.tobytes()).hexdigest(),
        "plan version": plan.VERSION,
        "run.seed": config.run.seed,
        "train.batch": config.train.batch,
        "model.name": config.model.name,
        "objective.name": config.objective.name,
        "optim.name": config.optim.name,
        **{f"data.{key}": getattr(config.data, key) for key in ("balanced_per_epoch", "lanes", "block")},
    }
    if session.objective.sop is not None:
        found |= {"objective.variant": config.objective.variant}
    return found


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Tensors by name as one file, whole or not at all."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_whole(path, save(plain))


def read_tensors(path: Path) -> dict[str, Tensor]:
    """What `write_tensors` wrote."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None


def _fresh(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _state_of(session: Session) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "sopdist": __version__,
        "torch": torch.__version__,
        "step": session.step,
        "best": session.best,
        "ranks": session.world.size,
        "fingerprint": fingerprint(session),
    }


def _read_state(folder: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads((folder / STATE).read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{folder / STATE}: cannot be read: {error}") from None
    if state.get("format") != FORMAT:
        raise DataError(
            f"{folder}: has format {state.get('format')}, this sopdist {__version__} reads {FORMAT}; "
            f"go on with the sopdist that wrote it: {state.get('sopdist')}"
        )
    return state


def _compare(folder: Path, saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    differs = [f"{key}: {saved.get(key)} there, {here[key]} here" for key in here if saved.get(key) != here[key]]
    if differs:
        raise DataError(
            f"{folder}: is of another run:\n  " + "\n  ".join(differs) + "\nstart a new one with another run.name"
        )


def _load_rows(session: Session, folder: Path) -> None:
    if session.objective.sop is None:
        return
    parts = [read_tensors(path) for path in sorted(folder.glob("noise-*-of-*.safetensors"))]
    if not parts:
        raise DataError(f"{folder}: has no rows of the noise table; was it written with objective.name = ce?")
    table = session.objective.sop.table
    try:
        table.load_state_dict(deal(parts, table.first, table.stride))
    except (ValueError, RuntimeError) as error:
        raise DataError(f"{folder}: {error}") from None
