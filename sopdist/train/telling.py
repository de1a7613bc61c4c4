"""What a run says while it goes on: gathered over ranks, written down by rank 0. All functions are collective."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import torch

from .session import Session
from .tally import metrics_of

_logger = logging.getLogger("sopdist.train")


def tell_beginning(session: Session, checkpoint: Path | None) -> None:
    """One line about what begins, and what it goes on from."""
    config, world = session.config, session.world
    if session.journal is None:
        return
    session.journal.rewind(session.step)
    ranks = f"{world.size} ranks" if world.size > 1 else "one rank"
    table = session.objective.sop.table if session.objective.sop is not None else None
    noise = f"{config.objective.name}" if table is None else f"{config.objective.name} ({table.layout} table)"
    _logger.info(
        "%s: %s samples, %s classes, %s, %s, %s on %s (%s), %s steps",
        session.folder, f"{len(session.stream.split):,}", len(session.stream.split.manifest.classes), config.model.name,
        noise, ranks, world.device.type, _engine_name(session), f"{session.total_steps:,}",
    )  # fmt: skip
    if checkpoint is not None:
        _logger.info("goes on from %s, at step %s", checkpoint, f"{session.step:,}")


def tell_steps(session: Session, epoch: int, rate: float) -> None:
    """Loss, accuracy and throughput since the last time."""
    world = session.world
    waited = session.objective.waited()
    session.clock.add("exchange", waited - session.waited)
    session.waited = waited
    lap = session.clock.lap()
    mine = session.tally.take()
    parts = ("data", "exchange", "checkpoint", "compute", "total")
    sums = world.sum([*mine, *(lap[part] for part in parts)])
    peak = world.max([_peak_memory(session)])[0]
    tallied, times = sums[: len(mine)], dict(zip(parts, sums[len(mine) :], strict=True))
    metrics: dict[str, Any] = metrics_of(tallied)
    seconds = times["total"] / world.size  # ranks run in step, so their times are equal but for a breath
    samples_a_second = metrics.pop("samples") / seconds if seconds else None
    metrics |= {
        "lr": rate,
        "samples_per_second": samples_a_second,
        "samples_per_second_a_rank": samples_a_second / world.size if samples_a_second else None,
        **{f"{part}_share": times[part] / times["total"] if seconds else None for part in parts[:-1]},
        "peak_memory_bytes": peak,
    }
    norm = session.engine.grad_norm()
    if norm is not None:
        metrics["grad_norm"] = norm
    bad = world.sum([float(session.stream.stats().bad)])[0]
    metrics["unreadable_samples"] = bad
    if session.journal is not None:
        session.journal.log("train", session.step, epoch, metrics)


def tell_end(session: Session) -> None:
    """Write the summary."""
    if session.journal is not None:
        summary = {"steps": session.step, "ranks": session.world.size, "engine": _engine_name(session)}
        summary |= {"seconds": time.time() - session.started}
        session.journal.finish(summary, finished=True)


def _engine_name(session: Session) -> str:
    kind, settings = session.world.kind, session.config.engine
    return f"deepspeed, ZeRO {settings.zero}" if kind == "deepspeed" else kind


def _peak_memory(session: Session) -> float:
    """Bytes: of the GPU, or of the process."""
    if session.world.device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(session.world.device))
    import resource

    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024
