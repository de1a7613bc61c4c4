"""Going on from a checkpoint: which one, whether it is intact and of this run, and its state back in place.

Works for checkpoints of any engine and any number of ranks. At the same number of ranks the run goes on as if it had
never stopped, bit for bit; at another, all that is saved is the same, and sums over ranks are rounded in another order.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ..checkpoint import Saved, complete_checkpoints, open_checkpoint, verify_checkpoint
from ..checkpoint.folder import clean, forget_after, is_complete, set_aside, step_of
from ..data.errors import DataError
from .ending import FINISHED, ending_of
from .fingerprint import compare, fingerprint
from .run_folder import SUMMARY_JSON
from .session import Session
from .tally import SUMS
from .world import TogetherError, World

_logger = logging.getLogger("sopdist.train")


@dataclass(frozen=True)
class Start:
    """Where a run begins."""

    folder: Path | None = None  # the checkpoint; None: at the beginning
    damaged: list[Path] = field(default_factory=list)  # newer ones that cannot be used
    newest: bool = True  # the run has no other newer ones; False: somebody has chosen it, and may go back


def find_start(world: World, run: Path, resume: str) -> Start:
    """The checkpoint that `--resume` means. Collective; nothing is written.

    `auto` is the newest of the run that is intact, if there is one. The ranks share the reading of its files.
    """
    if resume == "none":
        return Start()
    if resume != "auto":
        folder = Path(world.on_first(lambda: str(_named(run, resume))))
        world.agree(lambda: verify_checkpoint(folder, world.rank, world.size))
        return Start(folder, newest=False)
    candidates = world.on_first(lambda: [str(path) for path in complete_checkpoints(run)])
    damaged: list[Path] = []
    for folder in (Path(name) for name in reversed(candidates)):
        try:
            world.agree(lambda folder=folder: verify_checkpoint(folder, world.rank, world.size))  # type: ignore[misc]
        except TogetherError as error:
            damaged.append(folder)
            if world.rank == 0:
                _logger.warning("%s CANNOT BE USED, the one before is tried: %s", folder.name, error)
        else:
            return Start(folder, damaged)
    if damaged:
        raise TogetherError(
            f"{run}: no checkpoint is intact of {len(damaged)}; run.name=... begins another run, "
            f"--resume PATH goes on from elsewhere"
        )
    return Start()


def load_checkpoint(session: Session, folder: Path, allow: Collection[str] = ()) -> None:
    """Go on from a checkpoint. Collective; refuses one of another run, and says what differs."""
    world, engine = session.world, session.engine
    saved = world.agree(lambda: open_checkpoint(folder))
    label_sets = _label_set(saved), session.config.data.labels
    allowed = world.agree(lambda: compare(folder, saved.fingerprint, fingerprint(session), allow, label_sets))
    if allowed and world.rank == 0:
        _logger.warning("%s: goes on, as allowed, with %s", folder, "; ".join(allowed))
    own = world.rank if saved.ranks == world.size else None  # the rank whose part this one goes on with
    network = world.agree(lambda: saved.section("network/") | saved.statistics(own))
    sound = world.agree(lambda: saved.section("sound/"))
    optimizer = world.agree(lambda: {} if _changed(saved, session, "optim.name") else saved.section("optimizer/"))
    try:  # these talk to other ranks themselves, and what is wrong with a file is wrong for all of them
        engine.load_network_state(network, sound)
        engine.load_optimizer_state(optimizer)
    except DataError as error:
        raise TogetherError(f"{folder}: {error}") from None
    about = saved.index.about
    engine.load_loss_scale(about.get("loss_scale", {}))
    dropped = world.sum([world.agree(lambda: _load_rows(session, saved))])[0]
    if dropped and world.rank == 0:
        _logger.warning(
            "%s: rows of its noise table hold more than the slots here: %s of the smallest entries ARE DROPPED; "
            "objective.slots=... gives more, objective.layout=dense room for all",
            folder, f"{dropped:,.0f}",
        )  # fmt: skip
    sums = world.agree(lambda: _tally(saved, world))
    if sums is not None and sums[:-1].shape == session.tally.sums.shape:  # another sopdist may count other things
        session.tally.sums.copy_(sums[:-1])
        session.carried_samples, session.unreadable_before = int(sums[SUMS.index("samples")]), int(sums[-1])
    session.step = saved.step
    if folder.resolve().parent.parent == session.folder.resolve():  # another run's best network stays with it
        session.best, session.best_step = saved.best, int(about.get("best_step", -1))
    session.unreadable, session.failed_saves = int(about.get("unreadable", 0)), int(about.get("failed_saves", 0))


def is_finished(session: Session, folder: Path) -> bool:
    """Whether this checkpoint is the last of a run that has ended well: then its record must stay as it is. Collective.

    TogetherError if it is past the end that the config sets: half of a run would look like a whole one.
    """
    step, end = session.step, session.total_steps
    if step > end:
        raise TogetherError(
            f"{folder}: is of step {step:,}, but with this config the run ends after {end:,}: train.epochs=... or "
            f"train.max_steps=... for a later end, --resume PATH for an earlier step",
            config=True,
        )

    def ended() -> bool:
        summary = session.folder / SUMMARY_JSON
        own = folder.resolve().is_relative_to(session.folder.resolve())
        return step == end and own and summary.exists() and ending_of(summary) == FINISHED

    finished: bool = session.world.on_first(ended)
    if finished and session.world.rank == 0:
        _logger.info("%s is finished already: nothing to do; train.epochs=... goes on", session.folder)
    return finished


def begin_from(session: Session, start: Start) -> None:
    """The run has begun: put aside what is damaged or from later, and remove what is not complete. Collective."""

    def tidy() -> None:
        if start.newest:
            _refuse_later(session, start)
        for folder in start.damaged:
            set_aside(folder)
        clean(session.folder)
        forget_after(session.folder, session.step, start.folder)
        session.requests.watch(session.folder, session.config.checkpoint.minutes)

    session.world.on_first(tidy)


def _refuse_later(session: Session, start: Start) -> None:
    """The lock keeps others away, but not every drive knows locks: never remove what somebody has just saved."""
    for folder in complete_checkpoints(session.folder):
        if step_of(folder) > session.step and folder not in start.damaged:
            raise DataError(
                f"{folder}: was saved by another process while this one began from step {session.step}; "
                f"when that has ended, --resume auto goes on"
            )


def _named(run: Path, resume: str) -> Path:
    path = Path(resume)
    complete = [path] if is_complete(path) else complete_checkpoints(path)
    if not complete:
        raise DataError(f"--resume {resume}: neither a checkpoint nor a run with one")
    if complete_checkpoints(run) and complete[-1].resolve().parent.parent != run.resolve():
        raise DataError(
            f"--resume {resume}: is of another run, and {run} holds one already: run.name=... names a new one"
        )
    return complete[-1]


def _changed(saved: Saved, session: Session, key: str) -> bool:
    return bool(saved.fingerprint.get(key) != fingerprint(session)[key])


def _load_rows(session: Session, saved: Saved) -> int:
    """How many entries of this rank's rows did not fit into their slots."""
    if session.objective.sop is None or (not saved.has_noise and _changed(saved, session, "objective.name")):
        return 0
    table = session.objective.sop.table
    try:
        rows = saved.noise(table.first, table.stride)
        table.load_state_dict(rows)
    except (ValueError, RuntimeError) as error:
        raise DataError(f"{saved.folder}: {error}") from None
    if table.evictions is None:
        return 0
    before = int(rows["evictions"].sum()) if "evictions" in rows else 0
    return int(table.evictions.sum()) - before


def _label_set(saved: Saved) -> str:
    """What a checkpoint's labels were called, if it says so."""
    data = saved.config.get("data")
    name = data.get("labels") if isinstance(data, dict) else None
    return name[:100] if isinstance(name, str) else ""


def _tally(saved: Saved, world: World) -> Tensor | None:
    """Sums since the last line of metrics.jsonl: a rank's own, or, if the ranks were others, all of them for rank 0."""
    if "tally/0" not in saved.tensors:
        return None
    if saved.ranks == world.size:
        return saved.read(f"tally/{world.rank}")
    total = torch.stack([saved.read(f"tally/{rank}") for rank in range(saved.ranks)]).sum(0)
    return total if world.rank == 0 else torch.zeros_like(total)
