"""From a config to the end of a run."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ..config import ConfigError
from ..data.errors import DataError
from . import config as configs
from .config import Config
from .fingerprint import check_allowed
from .forecast import check_ranks
from .interrupts import was_interrupted
from .nonfinite import NonFiniteError
from .place import Place, find_place
from .preemption import PreemptedError, Requests, listening
from .together import BAD_CONFIG, FAILED, OK, PREEMPTED, lost_contact, tell, work_together
from .world import TogetherError, World

if TYPE_CHECKING:
    from .resume import Start
    from .session import Claim

_INTERRUPTED = "interrupted"  # in a summary


def run_config(
    name: str, overrides: Sequence[str] = (), *, resume: str = "none", allow_change: Sequence[str] = ()
) -> int:
    """Train what the config says; returns the exit code."""
    place = find_place(os.environ)
    logging.basicConfig(level=logging.INFO if place.rank == 0 else logging.WARNING, format=_format(place))
    for chatty in ("accelerate", "torch", "deepspeed", "DeepSpeed", "wandb"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    try:
        config = configs.load(name, overrides)
        check_ranks(config, place.size)
        check_allowed(allow_change)
    except (ConfigError, DataError) as error:  # every rank finds the same
        tell(place.rank, error)
        return BAD_CONFIG
    with listening(place.launcher) as requests:
        return work_together(place, config.engine, lambda world: _train(config, world, requests, resume, allow_change))


def _train(config: Config, world: World, requests: Requests, resume: str, allow_change: Sequence[str]) -> int:
    from .checkpoint import Saver
    from .epoch_end import keep_last
    from .loop import train
    from .resume import begin_from, is_finished, load_checkpoint
    from .session import begin_record, open_session
    from .telling import tell_beginning, tell_end, tell_stop

    claim, start = _claim_and_find_start(config, world, resume)
    session = open_session(config, world, requests, claim)
    try:
        if start.folder is not None:
            load_checkpoint(session, start.folder, allow_change)
            if is_finished(session, start.folder):
                return OK
        begin_record(session, resume=resume != "none")
        begin_from(session, start)
        saver = Saver(session)
        tell_beginning(session, start.folder)
        try:
            train(session, saver)
            keep_last(session)
            saver.wait()
        except PreemptedError:
            saver.wait()
            tell_stop(session, saver.saved_step)
            return PREEMPTED
        except (TogetherError, NonFiniteError):  # raised by all ranks: none must part while a save is under way
            saver.wait()
            raise
        return OK if tell_end(session) else FAILED
    except BaseException as error:
        try:
            reason = _reason(error)
        except KeyboardInterrupt:  # a rank that has waited for another one until that was gone gets to its own only now
            reason = _INTERRUPTED
        if reason == _INTERRUPTED:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # some launchers send it again; the summary comes first
        if session.journal is not None:
            with suppress(Exception):
                session.journal.finish({"exit": reason, "steps": session.step}, finished=False)
        raise
    finally:
        session.close()


def _claim_and_find_start(config: Config, world: World, resume: str) -> tuple[Claim, Start]:
    """Lock the run, then look for where it goes on: whoever has worked on it until now may save until the very end.

    Where there is no run yet nobody does, and a wrong --resume must not look like a run afterwards: look first.
    """
    from .resume import find_start
    from .session import claim_run

    run = Path(config.run.folder) / config.run.name
    start = None if world.on_first(run.is_dir) else find_start(world, run, resume)
    claim = claim_run(config, world, resume=resume != "none")
    try:
        return claim, start or find_start(world, claim.folder, resume)
    except BaseException:
        claim.close()
        raise


def _reason(error: BaseException) -> str:
    """Why a run has ended, for its summary."""
    if isinstance(error, KeyboardInterrupt) or was_interrupted():
        return _INTERRUPTED
    if isinstance(error, Exception) and lost_contact(error):
        return "another rank was lost"
    return f"{type(error).__name__}: {error}"


def _format(place: Place) -> str:
    return "%(message)s" if place.size == 1 else f"rank {place.rank}: %(message)s"
