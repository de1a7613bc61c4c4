"""From a config to the end of a run."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ..config import ConfigError
from ..data.errors import DataError
from . import config as configs
from .config import Config
from .forecast import check_ranks
from .place import Place, find_place
from .together import BAD_CONFIG, FAILED, OK, lost_contact, tell, work_together
from .world import World


def run_config(name: str, overrides: Sequence[str] = (), *, resume: str = "none") -> int:
    """Train what the config says; returns the exit code."""
    place = find_place(os.environ)
    logging.basicConfig(level=logging.INFO if place.rank == 0 else logging.WARNING, format=_format(place))
    for chatty in ("accelerate", "torch", "deepspeed", "DeepSpeed", "wandb"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    try:
        config = configs.load(name, overrides)
        check_ranks(config, place.size)
    except (ConfigError, DataError) as error:  # every rank finds the same
        tell(place.rank, error)
        return BAD_CONFIG
    return work_together(place, config.engine, lambda world: _train(config, world, resume))


def _train(config: Config, world: World, resume: str) -> int:
    from .checkpoint import find_checkpoint, forget_later, load_checkpoint
    from .loop import train
    from .session import begin_record, open_session
    from .telling import tell_beginning, tell_end

    # Rank 0 chooses for all, before anything is written: a wrong --resume must not look like a run afterwards.
    run = Path(config.run.folder) / config.run.name
    found = world.on_first(lambda: str(find_checkpoint(run, resume) or ""))
    checkpoint = Path(found) if found else None
    session = open_session(config, world, resume=resume != "none")
    try:
        if checkpoint is not None:
            load_checkpoint(session, checkpoint)
        begin_record(session, resume=resume != "none")
        forget_later(session)
        tell_beginning(session, checkpoint)
        train(session)
        return OK if tell_end(session) else FAILED
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # some launchers send it again; the summary comes first
        if session.journal is not None:
            with suppress(Exception):
                session.journal.finish({"exit": _reason(error), "steps": session.step}, finished=False)
        raise
    finally:
        session.close()


def _reason(error: BaseException) -> str:
    """Why a run has ended, for its summary."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, Exception) and lost_contact(error):
        return "another rank was lost"
    return f"{type(error).__name__}: {error}"


def _format(place: Place) -> str:
    return "%(message)s" if place.size == 1 else f"rank {place.rank}: %(message)s"
