"""Run a function on all ranks, from init to shutdown, and turn the outcome into an exit code.

An error that every rank raises is printed once, by rank 0, and all ranks shut down together. A rank that fails alone
prints its error and exits at once; the others notice (`watchdog`) and exit as well. No rank waits for a dead one.

Independent of what the function does.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable

from torch.distributed import DistError

from ...errors import ConfigError, DataError
from ..settings import EngineSettings
from . import watchdog
from .accelerator import reset_accelerator
from .interrupts import INTERRUPTED, note_interrupts, was_interrupted
from .launch_env import LaunchEnv
from .world import CollectiveError, World, open_world

OK, FAILED, BAD_CONFIG, PREEMPTED = 0, 1, 2, 75

# Parts, in lower case, of the messages of gloo, NCCL and torch's store when another process is gone or does not answer.
_LOST_CONTACT = (
    "connection closed by", "connection reset", "connection refused", "connection was likely closed", "broken pipe",
    "timed out waiting", "socket has timed out", "wait timeout after", "timeout caused pair closure",
    "collective operation timeout", "before timing out",
    "remote process exited", "remote process exiting", "communicator was aborted", "ncclremoteerror",
)  # fmt: skip


def run_ranks(env: LaunchEnv, settings: EngineSettings, work: Callable[[World], int]) -> int:
    """Connect to the other ranks, run `work`, shut down; returns the exit code."""
    with note_interrupts():
        return _run(env, settings, work)


def _run(env: LaunchEnv, settings: EngineSettings, work: Callable[[World], int]) -> int:
    try:
        world = open_world(env, settings)
    except ConfigError as error:  # the same on every rank, and before any rank waits for another
        return report_error(env.rank, error)
    except DistError as error:
        where = f"{env.master}:{env.port}"
        print(f"sopdist: rank {env.rank}: cannot connect to the other ranks at {where}: {error}", file=sys.stderr)
        reset_accelerator()  # it is half-initialised
        return FAILED
    watching = watchdog.start(world)
    code = FAILED
    try:
        code = work(world)
    except CollectiveError as error:
        code = report_error(world.rank, error)
    except ConfigError as error:
        code = report_error(world.rank, error)
    except KeyboardInterrupt:
        _exit_interrupted(world)
    except Exception as error:
        if was_interrupted():  # Python dropped the interrupt, which caused this error
            _exit_interrupted(world)
        if world.size > 1:
            _fail_alone(world, error)
        if not isinstance(error, DataError | OSError):
            raise
        code = report_error(0, error)
    watching.stop()
    try:
        world.close()
    except RuntimeError as error:  # another rank failed alone or was killed, and does not reach the last barrier
        if code == OK:
            print(f"sopdist: rank {world.rank}: lost contact with another rank at the end: {error}", file=sys.stderr)
        _exit_now(code or watchdog.LOST)
    return code


def report_error(rank: int, error: object) -> int:
    """Print an error that all ranks have, on rank 0 only; returns the exit code for it."""
    if rank == 0:
        print(f"sopdist: {error}", file=sys.stderr, flush=True)
    if isinstance(error, CollectiveError) and error.exit_code is not None:
        return error.exit_code
    config = isinstance(error, ConfigError) or (isinstance(error, CollectiveError) and error.config)
    return BAD_CONFIG if config else FAILED


def _exit_interrupted(world: World) -> None:
    report_error(world.rank, "interrupted; --resume auto resumes from the newest checkpoint")
    _exit_now(INTERRUPTED)


def _fail_alone(world: World, error: Exception) -> None:
    """Exit because of an error that the other ranks do not have, or that comes from losing one of them."""
    expected = isinstance(error, DataError | OSError)
    if expected:
        print(f"sopdist: rank {world.rank}: {error}", file=sys.stderr, flush=True)
    elif lost_contact(error):
        # Normally the watchdog finds the dead rank meanwhile, names it and exits this process.
        time.sleep(watchdog.HEARTBEAT_TIMEOUT + watchdog.GRACE)
        print(f"sopdist: rank {world.rank}: lost contact with another rank: {error}", file=sys.stderr, flush=True)
        _exit_now(watchdog.LOST)
    else:
        print(f"sopdist: rank {world.rank} has failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
    _exit_now(FAILED)


def lost_contact(error: Exception) -> bool:
    """Whether an error only says that another rank is gone. A library's name in it is not enough: it may be a bug."""
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(part in text for part in _LOST_CONTACT)


def _exit_now(code: int) -> None:
    """Exit without cleanup, which would wait for the other ranks and hang."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
