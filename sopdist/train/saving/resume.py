"""Resuming from a checkpoint: which one, whether it is intact and belongs to this run, and its state restored.

Works for checkpoints of any engine and any number of ranks. On the same number of ranks the run is bit-identical to one
that never stopped; on a different number, all saved state is the same, but sums over ranks are rounded in a different
order.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from ...checkpoint import Checkpoint, complete_checkpoints, open_checkpoint, verify_checkpoint
from ...checkpoint.folder import clean, is_complete, set_aside, set_aside_after, step_of
from ...errors import DataError
from ..distributed.world import CollectiveError, World
from ..progress import Progress
from ..record.exit_status import FINISHED, read_exit_status
from ..record.reporter import Reporter
from ..record.run_folder import SUMMARY_JSON
from ..session import Session
from .fingerprint import allowed_changes, compare, saved_fingerprint
from .sections import sections_of

_logger = logging.getLogger("sopdist.train")


@dataclass(frozen=True)
class ResumePoint:
    """Where a run starts."""

    folder: Path | None = None  # the checkpoint; None: from scratch
    damaged: list[Path] = field(default_factory=list)  # newer ones that cannot be used
    newest: bool = True  # there are no newer ones besides those; False: the user chose it, and may go back


def find_resume_point(world: World, run: Path, resume: str) -> ResumePoint:
    """The checkpoint that `--resume` refers to. Collective; writes nothing.

    `auto` is the newest intact one of the run, if there is one. The ranks share the reading of its files.
    """
    if resume == "none":
        return ResumePoint()
    if resume != "auto":
        folder = Path(world.on_rank0(lambda: str(_named(run, resume))))
        world.on_all_ranks(lambda: verify_checkpoint(folder, world.rank, world.size))
        return ResumePoint(folder, newest=False)
    candidates = world.on_rank0(lambda: [str(path) for path in complete_checkpoints(run)])
    damaged: list[Path] = []
    for folder in (Path(name) for name in reversed(candidates)):
        try:
            world.on_all_ranks(lambda folder=folder: verify_checkpoint(folder, world.rank, world.size))  # type: ignore[misc]
        except CollectiveError as error:
            damaged.append(folder)
            if world.rank == 0:
                _logger.warning("%s cannot be used; trying the previous checkpoint: %s", folder.name, error)
        else:
            return ResumePoint(folder, damaged)
    if damaged:
        raise CollectiveError(
            f"{run}: none of its {len(damaged)} checkpoints is intact; start a new run with run.name=..., or use "
            f"--resume PATH"
        )
    return ResumePoint()


def load_checkpoint(
    session: Session, progress: Progress, reporter: Reporter, folder: Path, allow: Collection[str] = ()
) -> None:
    """Restore a checkpoint. Collective; refuses a checkpoint of another run with a list of the differences."""
    world = session.world
    saved = world.on_all_ranks(lambda: open_checkpoint(folder))
    there, here = saved_fingerprint(saved.fingerprint), session.fingerprint
    label_sets, changes = (_label_set(saved), session.config.data.labels), allowed_changes(session.config)
    allowed = world.on_all_ranks(lambda: compare(folder, there, here, allow, changes, label_sets))
    if allowed and world.rank == 0:
        _logger.warning("%s: resuming with these allowed changes: %s", folder, "; ".join(allowed))

    def unchanged(key: str) -> bool:
        return bool(there.get(key) == here[key])

    same_run = folder.resolve().parent.parent == session.folder.resolve()
    for section in sections_of(
        session,
        progress,
        reporter,
        load_optimizer=unchanged("optim.name"),
        same_method=unchanged("method.name"),
        same_run=same_run,
    ):
        section.load(saved)


def is_finished(session: Session, progress: Progress, folder: Path) -> bool:
    """Whether this checkpoint is the last of a finished run, whose record must not change. Collective.

    CollectiveError if it is past the end set by the config: a part of a run would look like a complete one.
    """
    step, end = progress.step, session.total_steps
    if step > end:
        raise CollectiveError(
            f"{folder}: was saved at step {step:,}, but this config ends the run after step {end:,}; increase "
            f"train.epochs or train.max_steps, or resume from an earlier checkpoint with --resume PATH",
            config=True,
        )

    def finished() -> bool:
        summary = session.folder / SUMMARY_JSON
        own = folder.resolve().is_relative_to(session.folder.resolve())
        return step == end and own and summary.exists() and read_exit_status(summary) == FINISHED

    done: bool = session.world.on_rank0(finished)
    if done and session.world.rank == 0:
        _logger.info("%s has already finished; increase train.epochs to continue it", session.folder)
    return done


def start_from(session: Session, progress: Progress, point: ResumePoint) -> None:
    """Called when the run starts: set aside damaged and newer checkpoints, and remove incomplete ones. Collective."""

    def tidy() -> None:
        if point.newest:
            _refuse_newer(session, progress, point)
        for folder in point.damaged:
            set_aside(folder)
        clean(session.folder)
        set_aside_after(session.folder, progress.step, point.folder)
        session.requests.watch(session.folder, session.config.checkpoint.minutes)

    session.world.on_rank0(tidy)


def _refuse_newer(session: Session, progress: Progress, point: ResumePoint) -> None:
    """Not every file system supports locks: never remove what another process has just saved."""
    for folder in complete_checkpoints(session.folder):
        if step_of(folder) > progress.step and folder not in point.damaged:
            raise DataError(
                f"{folder}: was saved by another process while this one started from step {progress.step}; "
                f"wait until that process exits, then use --resume auto"
            )


def _named(run: Path, resume: str) -> Path:
    path = Path(resume)
    complete = [path] if is_complete(path) else complete_checkpoints(path)
    if not complete:
        raise DataError(f"--resume {resume}: not a checkpoint, and not a run that has one")
    if complete_checkpoints(run) and complete[-1].resolve().parent.parent != run.resolve():
        raise DataError(
            f"--resume {resume}: belongs to another run, but {run} already has checkpoints; choose a different run.name"
        )
    return complete[-1]


def _label_set(saved: Checkpoint) -> str:
    """The name of the labels that a checkpoint was trained on, if it has one."""
    data = saved.config.get("data")
    name = data.get("labels") if isinstance(data, dict) else None
    return name[:100] if isinstance(name, str) else ""
