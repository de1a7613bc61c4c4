"""The end of an epoch: evaluation, what the noise table has found, the best network, a checkpoint. All collective."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from ..noise import SOP
from .checkpoint import BEST, LAST, Saver, save_network
from .detection import noise_report
from .evaluate import evaluate
from .run_folder import SUSPECTS
from .session import Session
from .suspects import write_suspects
from .world import TogetherError

_logger = logging.getLogger("sopdist.train")


def end_epoch(session: Session, saver: Saver, epoch: int, *, save: bool) -> None:
    """Do what is due after this epoch; after the last one everything is. `save`: a checkpoint is due in any case."""
    config, clock = session.config, session.clock
    last = session.step >= session.total_steps
    session.engine.average_statistics()
    if last or (epoch + 1) % config.evaluate.every == 0:
        with clock.part("evaluate"):
            score = _evaluate(session, epoch)
            if session.objective.sop is not None:
                _tell_noise(session, session.objective.sop, epoch, last=last)
        with clock.part("checkpoint"):
            if score > session.best and _saved(session, lambda: save_network(session, BEST)):
                session.best, session.best_step = score, session.step
    if session.nonfinite_streak:  # a network that is breaking apart is nothing to go on from
        if session.world.rank == 0:
            _logger.warning("epoch %s is NOT SAVED: its last steps are not finite", epoch)
        session.network_lost = last
        return
    with clock.part("checkpoint"):
        if last:  # before the checkpoint, from which a resumed run would find that it is finished
            saver.wait()  # on a full disk, what a failed save has left behind is the room that is needed
            session.network_lost = not _saved(session, lambda: save_network(session, LAST))
        every = config.checkpoint.every
        if save or (every and (last or (epoch + 1) % every == 0)):
            saver.save()


def keep_last(session: Session) -> None:
    """Write the last network if it is missing: the run was finished before, but its disk was full. Collective."""
    if not session.network_lost and not session.world.on_first(lambda: (session.folder / LAST).exists()):
        session.network_lost = not _saved(session, lambda: save_network(session, LAST))


def _evaluate(session: Session, epoch: int) -> float:
    """Evaluate on all splits; the top-1 by which the best network is chosen, -1 without such a split."""
    session.engine.eval()
    metrics: dict[str, float] = {}
    for name, stream in session.evaluations.items():
        found = evaluate(session.engine.forward, stream, session.world)
        metrics |= {f"{name}/{key}": value for key, value in found.items()}
    session.engine.train()
    score = metrics.get(f"{session.config.evaluate.best or 'val'}/top1", -1.0)
    best = {"best": max(score, session.best)} if score >= 0 else {}
    if session.journal is not None and metrics:
        session.journal.log("eval", session.step, epoch, metrics | best)
    return score


def _tell_noise(session: Session, sop: SOP, epoch: int, *, last: bool) -> None:
    """What the table says about the labels, and, where the truth is known, how well; at the end, which they are."""
    given = torch.from_numpy(session.stream.labels.labels.astype("int64"))
    known = given.clamp_min(0)  # a sample without a label is never visited
    scores, flags, visited = sop.noise_scores(), sop.flags(known), sop.visited()
    proposed = sop.proposed_labels(known)
    active = int(sop.active().sum())
    evictions, evicted = sop.evictions()
    if session.journal is None:
        return
    truth = None if session.truth is None else session.truth.cpu().numpy()
    scored, flagged, instead, seen = (column.cpu().numpy() for column in (scores, flags, proposed, visited))
    classes = session.stream.split.manifest.classes
    report = noise_report(scored, flagged, instead, given.numpy(), truth, seen, len(classes))
    report |= {"active_rows": active, "evictions": evictions, "largest_evicted": evicted}
    session.journal.log("noise", session.step, epoch, report)
    if last and session.config.log.suspects:
        most, path = session.config.log.suspects, session.folder / SUSPECTS
        try:
            write_suspects(path, scored, flagged, instead, given.numpy(), classes, most)
        except OSError as error:
            _logger.warning("%s: CANNOT BE WRITTEN: %s", path, error.strerror or error)


def _saved(session: Session, save: Callable[[], None]) -> bool:
    """Whether it was saved. A failure costs a warning and is counted; the run goes on, and the last good one stays."""
    try:
        save()
        return True
    except TogetherError as error:
        session.failed_saves += 1
        if session.world.rank == 0:
            _logger.warning("COULD NOT SAVE, the run goes on: %s", error)
        return False
