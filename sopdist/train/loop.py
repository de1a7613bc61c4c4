"""The training loop.

    for each row of the plan: rows of the noise table come in a step ahead -> network -> loss -> facts go back to the
    rows' owners during the backward pass -> optimizer

A rank's loss is scaled so that the mean over the ranks, which the engine takes, is the mean over all samples of the
batch that count: so the number of ranks does not change what is computed.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from ..data.batch import Batch
from .checkpoint import Saver
from .epoch_end import end_epoch
from .nonfinite import NonFiniteGuard
from .optim import learning_rate
from .preemption import PreemptedError
from .session import Session
from .telling import tell_steps

_logger = logging.getLogger("sopdist.train")


def train(session: Session, saver: Saver) -> None:
    """Train from `session.step` to the end, or until somebody asks to stop: PreemptedError, when all is saved."""
    config, world, engine, objective = session.config, session.world, session.engine, session.objective
    stream, tally, clock = session.stream, session.tally, session.clock
    guard = NonFiniteGuard(session)
    steps, total_steps = stream.steps, session.total_steps
    stop_asked = save_due = 0.0
    clock.lap()  # what came before the first step is no part of it

    for epoch in range(session.step // steps, config.train.epochs):
        if session.step >= total_steps:
            break
        plan = stream.plan(epoch)
        rows = plan.rows  # (steps, batch): every rank knows what all ranks see
        start = session.step - epoch * steps
        stop = min(steps, total_steps - epoch * steps)
        engine.train()
        objective.expect(rows[start])
        for row, batch in zip(range(start, stop), clock.timed("data", stream.epoch(epoch, start)), strict=False):
            torch.manual_seed(seed_of(session))
            rate = learning_rate(config.optim, session.step, steps, total_steps)
            engine.set_lr(rate)
            objective.set_rate(rate)
            sums = world.begin_sum([float(batch.weight.sum()), guard.previous(), *session.requests.now()])
            if row + 1 < stop:
                objective.expect(rows[row + 1])
            here = batch.to(world.device)
            for number, piece in enumerate(here.pieces(config.train.accumulate), 1):
                with engine.piece(last=number == config.train.accumulate):
                    logits, logits2 = both_views(session, piece)
                    loss = objective.loss(logits, piece, logits2)
                    guard.watch(piece, tally.add(logits, loss, piece, truth_of(session, piece), logits2))
                    weight, nonfinite, stop_asked, save_due = sums.result()
                    engine.backward(loss * (world.size / max(weight, 1.0)))
            engine.step()
            objective.settle()
            guard.check(nonfinite)
            session.step += 1
            if session.journal is not None:
                session.journal.advance(session.step)
            if session.step % config.log.every == 0 or row + 1 == stop:
                tell_steps(session, epoch, rate, stream.allowed_bad(plan))
            saver.look()
            save_due += config.checkpoint.steps > 0 and session.step % config.checkpoint.steps == 0
            if row + 1 < stop and (stop_asked or save_due):
                guard.flush()
                save_within_epoch(session, saver)
                if stop_asked:
                    objective.drain()
                    raise PreemptedError
        guard.flush()
        end_epoch(session, saver, epoch, save=bool(stop_asked or save_due))
        if stop_asked and session.step < total_steps:
            raise PreemptedError


def save_within_epoch(session: Session, saver: Saver) -> None:
    """Between two steps. Collective."""
    if session.nonfinite_streak:  # a network that is breaking apart is nothing to go on from
        if session.world.rank == 0:
            _logger.warning("step %s is NOT SAVED: it is not finite", session.step)
        return
    with session.clock.part("checkpoint"):
        saver.save()


def both_views(session: Session, piece: Batch) -> tuple[Tensor, Tensor | None]:
    """Logits of one or two views, which go through the network together."""
    if piece.images2 is None:
        return session.engine.forward(piece.images), None
    logits = session.engine.forward(torch.cat([piece.images, piece.images2]))
    return logits.tensor_split(2)  # type: ignore[return-value]


def seed_of(session: Session) -> int:
    """For what is random in the network (dropout): the same on a resume, different on every rank and step."""
    return ((session.config.run.seed * 1_000_003 + session.step) * 1_000_003 + session.world.rank) % 2**63


def truth_of(session: Session, piece: Batch) -> Tensor | None:
    """The clean labels of a piece, -1 where unknown."""
    if session.truth is None:
        return None
    return session.truth[piece.index]
