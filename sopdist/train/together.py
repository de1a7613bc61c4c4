"""Work that all ranks do together, from their meeting to their parting, whatever happens in between.

Mistakes that all ranks know of are told once, by rank 0, and all ranks leave together. A rank that fails alone says so
and ends at once; the others find it gone (`lifeline`) and end, too. No rank waits for one that will not come.

Knows nothing of what the work is.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable

from torch.distributed import DistError

from ..config import ConfigError
from ..data.errors import DataError
from . import lifeline
from .acceleration import forget_accelerator
from .interrupts import INTERRUPTED, noting_interrupts, was_interrupted
from .nonfinite import NonFiniteError
from .place import Place
from .settings import EngineSettings
from .world import TogetherError, World, open_world

OK, FAILED, BAD_CONFIG, NOT_FINITE, PREEMPTED = 0, 1, 2, 3, 75

# What gloo, NCCL and torch's store say, in lower case, when another process has gone or does not answer.
_SIGNS_OF_LOSS = (
    "connection closed by", "connection reset", "connection refused", "connection was likely closed", "broken pipe",
    "timed out waiting", "socket has timed out", "wait timeout after", "timeout caused pair closure",
    "collective operation timeout", "before timing out",
    "remote process exited", "remote process exiting", "communicator was aborted", "ncclremoteerror",
)  # fmt: skip


def work_together(place: Place, settings: EngineSettings, work: Callable[[World], int]) -> int:
    """Meet the other ranks, work, and part; returns the exit code."""
    with noting_interrupts():
        return _meet_and_work(place, settings, work)


def _meet_and_work(place: Place, settings: EngineSettings, work: Callable[[World], int]) -> int:
    try:
        world = open_world(place, settings)
    except ConfigError as error:  # every rank finds the same, and has nobody to wait for yet
        return tell(place.rank, error)
    except DistError as error:
        where = f"{place.master}:{place.port}"
        print(f"sopdist: rank {place.rank}: cannot meet the other ranks at {where}: {error}", file=sys.stderr)
        forget_accelerator()  # it was made by half
        return FAILED
    watching = lifeline.start(world)
    code = FAILED
    try:
        code = work(world)
    except TogetherError as error:
        code = tell(world.rank, error)
    except NonFiniteError as error:  # raised by all ranks at the same step
        tell(world.rank, error)
        code = NOT_FINITE
    except ConfigError as error:
        code = tell(world.rank, error)
    except KeyboardInterrupt:
        _end_interrupted(world)
    except Exception as error:
        if was_interrupted():  # Python has dropped it: what else went wrong came of it
            _end_interrupted(world)
        if world.size > 1:
            _fail_alone(world, error)
        if not isinstance(error, DataError | OSError):
            raise
        code = tell(0, error)
    watching.stop()
    try:
        world.close()
    except RuntimeError as error:  # another rank has failed alone, or was killed, and is not at the last barrier
        if code == OK:
            print(f"sopdist: rank {world.rank}: lost contact with another rank at the end: {error}", file=sys.stderr)
        _end_alone(code or lifeline.LOST)
    return code


def tell(rank: int, error: object) -> int:
    """Rank 0 speaks for all."""
    if rank == 0:
        print(f"sopdist: {error}", file=sys.stderr, flush=True)
    config = isinstance(error, ConfigError) or (isinstance(error, TogetherError) and error.config)
    return BAD_CONFIG if config else FAILED


def _end_interrupted(world: World) -> None:
    tell(world.rank, "interrupted; --resume auto goes on from the newest checkpoint")
    _end_alone(INTERRUPTED)


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
