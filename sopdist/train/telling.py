"""What a run says while it goes on: gathered over ranks, written down by rank 0. All functions are collective."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import torch

from ..noise.rates import Forecast
from .forecast import rates_of
from .session import Session
from .tally import metrics_of
from .world import TogetherError

_PARTS = ("data", "exchange", "checkpoint", "compute", "total")
_logger = logging.getLogger("sopdist.train")


def tell_beginning(session: Session, checkpoint: Path | None) -> None:
    """One line about what begins, and what it goes on from."""
    config, world = session.config, session.world
    if session.journal is None:
        return
    ranks = f"{world.size} ranks" if world.size > 1 else "one rank"
    table = session.objective.sop.table if session.objective.sop is not None else None
    noise = f"{config.objective.name}" if table is None else f"{config.objective.name} ({table.layout} table)"
    _logger.info(
        "%s: %s samples, %s classes, %s, %s, %s on %s (%s), %s steps",
        session.folder, f"{len(session.stream.split):,}", len(session.stream.split.manifest.classes), config.model.name,
        noise, ranks, world.device.type, engine_name(session), f"{session.total_steps:,}",
    )  # fmt: skip
    if checkpoint is not None:
        _logger.info("goes on from %s, at step %s", checkpoint, f"{session.step:,}")
    if table is not None:
        rates = rates_of(config.objective, config.optim.lr)
        visits = min(config.train.epochs, session.total_steps * config.train.batch / len(session.stream.split))
        forecast = Forecast(rates.visits_to_activate(), visits, rates)
        if not forecast.activates:
            _logger.warning("%s", forecast)
    session.journal.rewind(session.step)  # from here on there is a progress bar


def tell_steps(session: Session, epoch: int, rate: float, allowed_bad: int) -> None:
    """Loss, accuracy, throughput, and where the time went, since the last time.

    The end of the run if the ranks together could not read more samples of the epoch than allowed.
    """
    world = session.world
    costs = session.objective.costs()
    exchange, session.exchanged = costs.since(session.exchanged), costs
    session.clock.add("exchange", exchange.waited)
    lap = session.clock.lap()
    mine = session.tally.take()
    others = [*(lap[part] for part in _PARTS), exchange.travelled, exchange.sent_bytes]
    others += [session.unreadable_here(), session.carried_samples]
    session.carried_samples = 0
    sums = world.sum([*mine, *others])
    metrics: dict[str, Any] = metrics_of(sums[: len(mine)])
    *times, travelled, sent_bytes, bad, carried = sums[len(mine) :]
    seconds = dict(zip(_PARTS, times, strict=True))  # of all ranks
    samples = metrics["samples"] - carried  # since the line before, or since the run was resumed
    a_rank_a_second = samples / seconds["total"] if seconds["total"] else None
    metrics |= {
        "lr": rate,
        "samples_per_second": a_rank_a_second * world.size if a_rank_a_second else None,
        "samples_per_second_a_rank": a_rank_a_second,
        **{f"{part}_share": seconds[part] / seconds["total"] for part in _PARTS[:-1] if seconds["total"]},
        "peak_memory_bytes": world.max([_peak_memory(session)])[0],  # of the rank that has most
        "unreadable_samples": bad,
        "failed_saves": session.failed_saves,
    }
    if world.size > 1 and samples:
        metrics["exchange_bytes_a_sample"] = sent_bytes / samples
        metrics["exchange_overlap"] = max(0.0, 1 - seconds["exchange"] / travelled) if travelled else None
    norm = session.engine.grad_norm()
    if norm is not None:
        metrics["grad_norm"] = norm
    if session.journal is not None:
        session.journal.log("train", session.step, epoch, metrics)
    if bad - session.unreadable > allowed_bad:
        raise TogetherError(
            f"{session.stream.split.store.root}: {bad - session.unreadable:.0f} samples could not be read in epoch "
            f"{epoch}, "
            f"data.max_bad_fraction = {session.config.data.max_bad_fraction} allows {allowed_bad}; the log names them"
        )
    if session.step % session.stream.steps == 0:
        session.unreadable = int(bad)


def tell_end(session: Session) -> bool:
    """Write the summary; False if that, or saving the network, was not possible: then the run was for nothing."""
    if session.journal is None:
        return not session.network_lost
    summary = {"steps": session.step, "ranks": session.world.size, "engine": engine_name(session)}
    summary |= {"seconds": time.time() - session.started, "failed_saves": session.failed_saves}
    if session.failed_saves:
        _logger.warning("%s: %s SAVES HAVE FAILED", session.folder, session.failed_saves)
    if session.network_lost:
        summary["exit"] = "the last network could not be saved"
    written = session.journal.finish(summary, finished=not session.network_lost)
    session.requests.obeyed()  # whoever asked while the last step was under way has got it, too
    return written and not session.network_lost


def tell_stop(session: Session, saved_step: int) -> None:
    """The run was asked to stop, and has: say why, and from where it goes on."""
    told = session.world.gather_objects(session.requests.reason)
    if session.journal is None:
        return
    reason = next(f"rank {rank}: {reason}" if rank else reason for rank, reason in enumerate(told) if reason)
    saved = saved_step == session.step
    ending = "preempted" if saved else "preempted, not saved"
    summary = {"exit": ending, "reason": reason, "steps": session.step, "saved_step": saved_step}
    summary |= {"failed_saves": session.failed_saves}
    session.journal.finish(summary, finished=False)
    session.requests.obeyed()  # not before it stands in the summary: `sopdist stop` looks there whether to ask
    where = "there" if saved else f"from step {saved_step}: THE LAST STEPS ARE NOT SAVED"
    _logger.warning(
        "%s: stopped after step %s: %s; --resume auto goes on %s", session.folder, session.step, reason, where
    )


def engine_name(session: Session) -> str:
    """How the network is spread, for people."""
    kind, settings = session.world.kind, session.config.engine
    return f"deepspeed, ZeRO {settings.zero}" if kind == "deepspeed" else kind


def _peak_memory(session: Session) -> float:
    """Bytes: of the GPU, or of the process."""
    if session.world.device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(session.world.device))
    import resource

    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024
