"""The training loop.

    for each batch of the plan: rows of sample tables arrive one step ahead -> network -> loss -> facts return to the
    owners of the rows during the backward pass -> optimizer

A rank's loss is scaled so that the mean over ranks, which the engine takes, is the mean over all samples of the batch
that count: the number of ranks does not change what is computed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .distributed.stop_requests import PreemptedError
from .epoch_end import end_epoch
from .nonfinite import NonFiniteGuard
from .optim import betas, learning_rate
from .progress import Progress
from .record.reporter import Reporter
from .saving.saver import Saver
from .session import Session


class Signals(NamedTuple):
    """Values that are summed over ranks in every step, besides gradients."""

    weight: float  # of the samples of the batch
    nonfinite: float  # samples of the previous step that were not finite
    stop: float  # ranks that were asked to stop
    save: float  # ranks that request a checkpoint


def train(session: Session, progress: Progress, reporter: Reporter, saver: Saver) -> None:
    """Train from `progress.step` to the end, or until a stop is requested: PreemptedError, after saving."""
    config, world, engine, method, stream = (
        session.config, session.world, session.engine, session.method, session.stream,
    )  # fmt: skip
    guard = NonFiniteGuard(session, progress)
    steps, total_steps = stream.steps, session.total_steps
    every = config.checkpoint.steps
    reporter.clock.lap()  # time before the first step does not count

    for epoch in range(progress.step // steps, config.train.epochs):
        if progress.step >= total_steps:
            break
        signals, save = Signals(0, 0, 0, 0), False
        engine.train()
        first = epoch * steps  # every epoch counts as `steps` steps, also one over fewer samples
        stage_first, stage_last = (at * steps for at in session.stage(epoch))
        start = progress.step - first
        if start == 0:
            method.between_epochs(epoch, session.between_epochs)
        method.begin_epoch(epoch)
        parts = method.parts(epoch)
        plan = stream.plan(epoch, parts)
        stop = min(plan.steps, total_steps - first)
        method.prefetch(plan.batches[start])  # (steps, batch): every rank knows the samples of all ranks
        batches = reporter.clock.timed("data", stream.epoch(epoch, start, parts))
        for position, batch in zip(range(start, stop), batches, strict=False):
            torch.manual_seed(dropout_seed(config.run.seed, progress.step, world.rank))
            # An epoch of fewer steps covers the same part of the schedule.
            stage_step = first + position * steps / plan.steps - stage_first
            lr = learning_rate(config.optim, stage_step, steps, min(total_steps, stage_last) - stage_first)
            lr *= method.lr_factor(epoch)
            engine.set_lr(lr, betas(config.optim, stage_step, steps))
            method.set_lr(lr)
            mine = Signals(float(batch.weight.sum()), guard.previous(), *session.requests.now())
            reduced = world.start_sum(mine)
            if position + 1 < stop:
                method.prefetch(plan.batches[position + 1])
            on_device = batch.to(world.device)
            for number, micro_batch in enumerate(on_device.micro_batches(config.train.accumulate), 1):
                with engine.micro_batch(last=number == config.train.accumulate):
                    output = method.step(engine.forward, micro_batch)
                    guard.watch(micro_batch, reporter.add(micro_batch, output))
                    signals = Signals(*reduced.result())
                    engine.backward(output.loss * (world.size / max(signals.weight, 1.0)))
            engine.step()
            method.flush()
            if session.average is not None:
                session.average.update()
            guard.check(signals.nonfinite)
            progress.step = first + (steps if position + 1 == plan.steps else position + 1)
            reporter.advance()
            if progress.step % config.log.every == 0 or position + 1 == stop:
                reporter.report_steps(epoch, lr, stream.allowed_bad(plan))
            saver.poll()
            save = bool(signals.save or signals.stop or (every and progress.step % every == 0))
            if save and position + 1 < stop:
                guard.flush()
                saver.save()
                if signals.stop:
                    method.discard_prefetched()
                    raise PreemptedError
        guard.flush()
        end_epoch(session, progress, reporter, saver, epoch, save=save)
        if signals.stop and progress.step < total_steps:
            raise PreemptedError


def dropout_seed(seed: int, step: int, rank: int) -> int:
    """Seed of random layers in the network: the same after a resume, different for every rank and step."""
    return ((seed * 1_000_003 + step) * 1_000_003 + rank) % 2**63
