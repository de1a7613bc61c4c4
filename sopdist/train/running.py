"""From a config to the end of a run: the ranks meet, everything is opened, trained, and closed, whatever happens.

Mistakes that all ranks know of are told once, by rank 0, and all ranks leave together. A rank that fails alone says so
and ends at once; the others find it gone (`lifeline`) and end, too. No rank waits for one that will not come.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from torch.distributed import DistError

from ..config import ConfigError
from ..data.errors import DataError
from . import config as configs
from . import lifeline
from .acceleration import forget_accelerator
from .config import Config
from .forecast import check_ranks
from .nonfinite import NonFiniteError
from .place import Place, find_place
from .world import TogetherError, World, open_world

OK, FAILED, BAD_CONFIG, NOT_FINITE, INTERRUPTED = 0, 1, 2, 3, 130

# What gloo, NCCL and torch's store say, in lower case, when another process has gone or does not answer.
_SIGNS_OF_LOSS = (
    "connection closed by", "connection reset", "connection refused", "connection was likely closed", "broken pipe",
    "timed out waiting", "socket has timed out", "wait timeout after", "timeout caused pair closure",
    "collective operation timeout", "before timing out",
    "remote process exited", "remote process exiting", "communicator was aborted", "ncclremoteerror",
)  # fmt: skip


def run_config(name: str, overrides: Sequence[str] = (), *, resume: str = "none") -> int:
    """Train what the config says; returns the exit code."""
    place = find_place(os.environ)
    logging.basicConfig(level=logging.INFO if place.rank == 0 else logging.WARNING, format=_format(place))
    for chatty in ("accelerate", "torch", "deepspeed", "DeepSpeed", "wandb"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    try:
        config = configs.load(name, overrides)
        check_ranks(config, place.size)
        world = open_world(place, config.engine)
    except (ConfigError, DataError) as error:  # every rank finds the same, and has nobody to wait for yet
        _tell(place.rank, error)
        return BAD_CONFIG
    except DistError as error:
        where = f"{place.master}:{place.port}"
        print(f"sopdist: rank {place.rank}: cannot meet the other ranks at {where}: {error}", file=sys.stderr)
        forget_accelerator()  # it was made by half
        return FAILED
    return _run_together(config, world, resume)


def _run_together(config: Config, world: World, resume: str) -> int:
    watching = lifeline.start(world)
    code = FAILED
    try:
        code = _train(config, world, resume)
    except TogetherError as error:
        code = _tell(world.rank, error)
    except NonFiniteError as error:  # raised by all ranks at the same step
        _tell(world.rank, error)
        code = NOT_FINITE
    except ConfigError as error:
        code = _tell(world.rank, error)
    except KeyboardInterrupt:
        _tell(world.rank, "interrupted")
        _end_alone(INTERRUPTED)
    except Exception as error:
        if world.size > 1:
            _fail_alone(world, error)
        if not isinstance(error, DataError | OSError):
            raise
        code = _tell(0, error)
    watching.stop()
    try:
        world.close()
    except RuntimeError as error:  # another rank has failed alone, or was killed, and is not at the last barrier
        if code == OK:
            print(f"sopdist: rank {world.rank}: lost contact with another rank at the end: {error}", file=sys.stderr)
        _end_alone(code or lifeline.LOST)
    return code


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


def _tell(rank: int, error: object) -> int:
    """Rank 0 speaks for all."""
    if rank == 0:
        print(f"sopdist: {error}", file=sys.stderr, flush=True)
    config = isinstance(error, ConfigError) or (isinstance(error, TogetherError) and error.config)
    return BAD_CONFIG if config else FAILED


def _fail_alone(world: World, error: Exception) -> None:
    """This rank cannot go on, and the others do not know. Or it is the other way round."""
    expected = isinstance(error, DataError | OSError)
    if expected:
        print(f"sopdist: rank {world.rank}: {error}", file=sys.stderr, flush=True)
    elif lost_contact(error):
        time.sleep(lifeline.SILENCE + lifeline.GRACE)  # the lifeline finds out who it is, says so and ends this rank
        print(f"sopdist: rank {world.rank}: lost contact with another rank: {error}", file=sys.stderr, flush=True)
        _end_alone(lifeline.LOST)
    else:
        print(f"sopdist: rank {world.rank} has failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
    _end_alone(FAILED)


def lost_contact(error: Exception) -> bool:
    """Whether a rank's error is only that another one is gone. A library's name in it is no sign: it may be a bug."""
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in _SIGNS_OF_LOSS)


def _end_alone(code: int) -> None:
    """Without good-byes: what waits for other ranks at the end of a process would hang."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _format(place: Place) -> str:
    return "%(message)s" if place.size == 1 else f"rank {place.rank}: %(message)s"
