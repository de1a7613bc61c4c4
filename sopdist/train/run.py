"""From a config to the end of a run."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UserError
from . import config as configs
from .config import Config
from .distributed.interrupts import was_interrupted
from .distributed.launch_env import LaunchEnv, find_launch_env
from .distributed.run_ranks import BAD_CONFIG, FAILED, OK, PREEMPTED, lost_contact, report_error, run_ranks
from .distributed.stop_requests import PreemptedError, Requests, listen_for_requests
from .distributed.world import CollectiveError, World
from .forecast import check_ranks
from .saving.fingerprint import check_allowed

if TYPE_CHECKING:
    from .saving.resume import ResumePoint
    from .session import RunLock

_INTERRUPTED = "interrupted"  # exit status in a summary
_logger = logging.getLogger("sopdist.train")


def run_config(
    name: str, overrides: Sequence[str] = (), *, resume: str = "none", allow_change: Sequence[str] = ()
) -> int:
    """Train as the config says; returns the exit code."""
    launch_env = find_launch_env(os.environ)
    _set_up_logging(launch_env)
    try:  # every rank finds the same mistakes
        note = _logger.warning if launch_env.rank == 0 else _logger.debug
        config = configs.load(name, overrides, note)
        check_ranks(config, launch_env.size)
        check_allowed(config, allow_change)
    except UserError as error:
        report_error(launch_env.rank, error)
        return BAD_CONFIG
    with listen_for_requests(launch_env.launcher) as requests:
        work = partial(_train, config, requests=requests, resume=resume, allow_change=allow_change)
        return run_ranks(launch_env, config.engine, work)


def _train(config: Config, world: World, *, requests: Requests, resume: str, allow_change: Sequence[str]) -> int:
    """The work of one rank, between init and shutdown of the process group; returns the exit code."""
    from .epoch_end import keep_last
    from .loop import train
    from .progress import Progress
    from .record.reporter import Reporter
    from .saving.resume import is_finished, load_checkpoint, start_from
    from .saving.saver import Saver
    from .session import open_session

    lock, point = _lock_and_find_resume_point(config, world, resume)
    session = open_session(config, world, requests, lock)
    progress = Progress()
    reporter = Reporter(session, progress)
    try:
        if point.folder is not None:
            load_checkpoint(session, progress, reporter, point.folder, allow_change)
            if is_finished(session, progress, point.folder):
                return OK
        reporter.open(resume=resume != "none")
        start_from(session, progress, point)
        saver = Saver(session, progress, reporter)
        reporter.start(point.folder)
        try:
            train(session, progress, reporter, saver)
            keep_last(session, progress, saver)
            saver.wait()
        except PreemptedError:
            saver.wait()
            reporter.stop(saver.saved_step)
            return PREEMPTED
        except CollectiveError:  # every rank raises it: none must leave while a save is in progress
            saver.wait()
            raise
        return OK if reporter.finish() else FAILED
    except BaseException as error:
        try:
            reason = _reason(error)
        except KeyboardInterrupt:  # delivered only now to a rank that was waiting for another one
            reason = _INTERRUPTED
        if reason == _INTERRUPTED:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # some launchers send it again; write the summary first
        with suppress(Exception):
            reporter.fail(reason)
        raise
    finally:
        session.close()


def _lock_and_find_resume_point(config: Config, world: World, resume: str) -> tuple[RunLock, ResumePoint]:
    """Lock the run, then choose the checkpoint: the process that held the lock may save until it exits.

    If the folder does not exist yet, choose first: a wrong --resume must not leave something that looks like a run.
    """
    from .saving.resume import find_resume_point
    from .session import lock_run_folder

    run = Path(config.run.folder) / config.run.name
    point = None if world.on_rank0(run.is_dir) else find_resume_point(world, run, resume)
    lock = lock_run_folder(config, world, resume=resume != "none")
    try:
        return lock, point or find_resume_point(world, lock.folder, resume)
    except BaseException:
        lock.close()
        raise


def _reason(error: BaseException) -> str:
    """Why a run has ended, for its summary."""
    if isinstance(error, KeyboardInterrupt) or was_interrupted():
        return _INTERRUPTED
    if isinstance(error, Exception) and lost_contact(error):
        return "another rank was lost"
    return f"{type(error).__name__}: {error}"


def _set_up_logging(launch_env: LaunchEnv) -> None:
    layout = "%(message)s" if launch_env.size == 1 else f"rank {launch_env.rank}: %(message)s"
    logging.basicConfig(level=logging.INFO if launch_env.rank == 0 else logging.WARNING, format=layout)
    for verbose in ("accelerate", "torch", "deepspeed", "DeepSpeed", "wandb"):
        logging.getLogger(verbose).setLevel(logging.WARNING)
