"""The end of an epoch: evaluation, readout of the labels, the best network, a checkpoint. Collective."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial

from .evaluate import evaluate
from .progress import Progress
from .record.reporter import Reporter
from .saving.saver import BEST, LAST, Saver
from .session import Session


def end_epoch(
    session: Session, progress: Progress, reporter: Reporter, saver: Saver, epoch: int, *, save: bool
) -> None:
    """Do what is due after this epoch; after the last one, everything is. `save`: a checkpoint is due anyway."""
    config = session.config
    last = progress.step >= session.total_steps
    session.engine.average_statistics()
    if last or (epoch + 1) % config.evaluate.every == 0:
        with reporter.clock.part("evaluate"):
            score = _evaluate(session, progress, reporter, epoch)
            reporter.report_labels(epoch, last=last)
        if score > progress.best and saver.save_network(BEST):
            progress.best, progress.best_step = score, progress.step
    if last and not progress.nonfinite_streak:
        # Before the checkpoint, from which a resumed run would conclude that it is finished.
        saver.wait()  # on a full disk, the remains of a failed save take up space that is needed
        progress.network_lost = not saver.save_last()
    elif last:
        progress.network_lost = True
    every = 1 if progress.nonfinite_streak else config.checkpoint.every  # `save` then warns that nothing is saved
    if save or (every and (last or (epoch + 1) % every == 0)):
        saver.save()


def keep_last(session: Session, progress: Progress, saver: Saver) -> None:
    """Write the last network if it is missing: the run was finished before, but its disk was full. Collective."""
    if not progress.network_lost and not session.world.on_rank0(lambda: (session.folder / LAST).exists()):
        progress.network_lost = not saver.save_last()


def _evaluate(session: Session, progress: Progress, reporter: Reporter, epoch: int) -> float:
    """Evaluate on all splits; returns the top-1 by which the best network is chosen, -1 without such a split."""
    session.engine.eval()
    predict = partial(session.method.predict, session.engine.forward)
    metrics: dict[str, float] = {}
    weights_of: list[tuple[str, AbstractContextManager[None]]] = [("", nullcontext())]
    if session.average is not None:
        weights_of.append(("_ema", session.average.in_use()))
    for suffix, weights in weights_of:
        with weights:
            for name, stream in session.evaluations.items():
                found = evaluate(predict, stream, session.world)
                metrics |= {f"{name}{suffix}/{key}": value for key, value in found.items()}
    session.engine.train()
    score = metrics.get(f"{session.config.evaluate.best or 'val'}/top1", -1.0)
    best = {"best": max(score, progress.best)} if score >= 0 else {}
    reporter.report_evaluation(epoch, metrics | best if metrics else {})
    return score
