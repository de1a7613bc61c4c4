"""What a run reports: measured on every rank, reduced over ranks, written by rank 0.

Owns the measurements since the last line of metrics.jsonl, so it also saves and restores them: a resumed run continues
in the middle of a line. All methods are collective unless they say otherwise.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...config import to_tree
from ...data.batch import Batch
from ...methods import StepOutput
from ...sample_table import ExchangeStats
from ..distributed.world import CollectiveError
from ..forecast import DataSizes, outlook_of, steps_of
from ..progress import Progress
from ..session import Session
from .clock import Clock
from .noise_metrics import noise_metrics
from .run_folder import SUSPECTS, open_run
from .run_log import RunLog
from .run_warnings import accuracy_warnings
from .step_metrics import SUMS, StepMetrics, metrics_of
from .suspects import write_suspects

_PARTS = ("data", "exchange", "checkpoint", "compute", "total")
_logger = logging.getLogger("sopdist.train")


class Reporter:
    """The measurements of one run, and where they go."""

    def __init__(self, session: Session, progress: Progress) -> None:
        self._session, self._progress = session, progress
        self.clock = Clock()
        self.run_log: RunLog | None = None  # on rank 0, from `open` on
        self._step_metrics = StepMetrics(session.world.device)
        self._exchange = ExchangeStats()  # as of the last line
        self._unreadable = 0  # samples of all ranks in earlier epochs
        self._unreadable_before = 0  # samples of this rank before the run was resumed
        self._carried = 0  # samples of this rank that were counted before the run was resumed
        self._started = time.time()
        self._warnings: tuple[str, ...] = ()  # of the method, after the last readout

    # -- from start to end ---------------------------------------------------------------------------------------------

    def open(self, *, resume: bool) -> None:
        """Write the config and open the log. Call it last, so that a failed start does not change an older run."""
        session = self._session

        def open_log() -> RunLog:
            open_run(session.config, resume=resume)
            tree = to_tree(session.config)
            name = session.config.run.name
            return RunLog(session.folder, session.config.log, tree, session.total_steps, name, session.classes)

        self.run_log = session.world.on_all_ranks(lambda: open_log() if session.world.rank == 0 else None)

    def start(self, checkpoint: Path | None) -> None:
        """Log one line about the run, and where it resumes from. Not collective."""
        if self.run_log is None:
            return
        session, config = self._session, self._session.config
        ranks = f"{session.world.size} ranks" if session.world.size > 1 else "one rank"
        _logger.info(
            "%s: %s samples, %s classes, %s, %s, %s on %s (%s), %s steps",
            session.folder, f"{len(session.stream.split):,}", len(session.classes), config.model.name,
            session.method.describe(), ranks, session.world.device.type, session.engine_name,
            f"{session.total_steps:,}",
        )  # fmt: skip
        if checkpoint is not None:
            _logger.info("resuming from %s at step %s", checkpoint, f"{self._progress.step:,}")
        data = DataSizes(len(session.stream.split), len(session.classes), session.stream.epoch_samples, {})
        outlook = outlook_of(config, session.method, data, steps_of(config, data))
        if outlook is not None and not outlook.works:
            _logger.warning("%s", outlook.text)
        self.run_log.rewind(self._progress.step)  # from here on there is a progress bar

    def finish(self) -> bool:
        """Write the summary; False if that failed, or if the last network could not be saved."""
        session, progress = self._session, self._progress
        if self.run_log is None:
            return not progress.network_lost
        summary: dict[str, Any] = {"steps": progress.step, "ranks": session.world.size, "engine": session.engine_name}
        summary |= {"seconds": time.time() - self._started, "failed_saves": progress.failed_saves}
        warnings = [*self._warnings, *accuracy_warnings(self.run_log.rows())]
        for warning in warnings:
            _logger.warning("%s: %s", session.folder, warning)
        summary["warnings"] = warnings
        if progress.failed_saves:
            _logger.warning("%s: %s saves failed", session.folder, progress.failed_saves)
        if progress.network_lost:
            summary["exit"] = "the last network could not be saved"
        written = self.run_log.finish(summary, finished=not progress.network_lost)
        session.requests.acknowledge_stop()  # a request during the last step has been fulfilled as well
        return written and not progress.network_lost

    def stop(self, saved_step: int) -> None:
        """Record why the run has stopped on request, and from which step it can be resumed."""
        session, step = self._session, self._progress.step
        reasons = session.world.gather_objects(session.requests.reason)
        if self.run_log is None:
            return
        reason = next(f"rank {rank}: {reason}" if rank else reason for rank, reason in enumerate(reasons) if reason)
        saved = saved_step == step
        exit_status = "preempted" if saved else "preempted, not saved"
        summary = {"exit": exit_status, "reason": reason, "steps": step, "saved_step": saved_step}
        summary |= {"failed_saves": self._progress.failed_saves}
        self.run_log.finish(summary, finished=False)
        session.requests.acknowledge_stop()  # after the summary, which `sopdist stop` reads before it requests a stop
        where = "this step" if saved else f"step {saved_step}; later steps were not saved"
        advice = f"use --resume auto to resume from {where}"
        _logger.warning("%s: stopped after step %s: %s; %s", session.folder, step, reason, advice)

    def fail(self, reason: str) -> None:
        """Record that the run ends with an error. Not collective."""
        if self.run_log is not None:
            self.run_log.finish({"exit": reason, "steps": self._progress.step}, finished=False)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def add(self, batch: Batch, output: StepOutput) -> Tensor:
        """Count a (micro-)batch; returns which of its samples (B,) count but are not finite. Not collective."""
        clean = self._session.clean_labels
        return self._step_metrics.add(output, batch, None if clean is None else clean[batch.index])

    def advance(self) -> None:
        """Called after each step. Cheap, and not collective."""
        if self.run_log is not None:
            self.run_log.advance(self._progress.step)

    def report_steps(self, epoch: int, lr: float, allowed_bad: int) -> None:
        """Log loss, accuracy, throughput and where the time went since the last line.

        CollectiveError if the ranks together failed to read more samples of the epoch than allowed.
        """
        session, world = self._session, self._session.world
        stats = session.method.exchange_stats()
        exchange, self._exchange = stats.since(self._exchange), stats
        self.clock.add("exchange", exchange.waited)
        lap = self.clock.lap()
        mine = self._step_metrics.take()
        others = [*(lap[part] for part in _PARTS), exchange.travelled, exchange.sent_bytes]
        others += [self._unreadable_here(), self._carried]
        self._carried = 0
        sums = world.sum([*mine, *others])
        metrics: dict[str, Any] = metrics_of(sums[: len(mine)])
        *times, travelled, sent_bytes, bad, carried = sums[len(mine) :]
        seconds = dict(zip(_PARTS, times, strict=True))  # of all ranks
        samples = metrics["samples"] - carried  # since the last line, or since the run was resumed
        per_rank = samples / seconds["total"] if seconds["total"] else None
        metrics |= {
            "lr": lr,
            **session.method.status(),
            "samples_per_second": per_rank * world.size if per_rank else None,
            "samples_per_second_per_rank": per_rank,
            **{f"{part}_share": seconds[part] / seconds["total"] for part in _PARTS[:-1] if seconds["total"]},
            "peak_memory_bytes": world.max([_peak_memory(world.device)])[0],  # of the rank that uses the most
            "unreadable_samples": bad,
            "failed_saves": self._progress.failed_saves,
        }
        if world.size > 1 and samples:
            metrics["exchange_bytes_per_sample"] = sent_bytes / samples
            metrics["exchange_overlap"] = max(0.0, 1 - seconds["exchange"] / travelled) if travelled else None
        norm = session.engine.grad_norm()
        if norm is not None:
            metrics["grad_norm"] = norm
        if self.run_log is not None:
            self.run_log.log("train", self._progress.step, epoch, metrics)
        if bad - self._unreadable > allowed_bad:
            raise CollectiveError(
                f"{session.stream.split.store.root}: {bad - self._unreadable:.0f} samples could not be read in epoch "
                f"{epoch}, data.max_bad_fraction = {session.config.data.max_bad_fraction} allows {allowed_bad}; "
                f"the log names them"
            )
        if self._progress.step % session.stream.steps == 0:
            self._unreadable = int(bad)

    # -- the end of an epoch -------------------------------------------------------------------------------------------

    def report_evaluation(self, epoch: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of the evaluation splits. Not collective."""
        if self.run_log is not None and metrics:
            self.run_log.log("eval", self._progress.step, epoch, metrics)

    def report_labels(self, epoch: int, *, last: bool) -> None:
        """Log what the method reports about the labels, scored against clean labels if known. `last`: list suspects."""
        session = self._session
        labels = torch.from_numpy(session.stream.labels.labels.astype("int64"))
        readout = session.method.readout(labels)
        if readout is None or self.run_log is None:
            return
        clean = None if session.clean_labels is None else session.clean_labels.cpu().numpy()
        given = labels.numpy()
        metrics = noise_metrics(readout, given, clean, len(session.classes)) | dict(readout.metrics)
        self.run_log.log("noise", self._progress.step, epoch, metrics)
        self._warnings = session.method.warnings(readout)
        if last and session.config.log.suspects:
            path = session.folder / SUSPECTS
            try:
                write_suspects(path, readout, given, session.classes, session.config.log.suspects)
            except OSError as error:
                _logger.warning("%s: cannot be written: %s", path, error.strerror or error)

    # -- saved state, in the section `step_metrics` --------------------------------------------------------------------

    def state(self) -> Tensor:
        """The sums of this rank since the last line, and its unreadable samples."""
        return torch.tensor([*self._step_metrics.sums.tolist(), self._unreadable_here()], dtype=torch.float64)

    def about(self) -> dict[str, Any]:
        """Replicated state."""
        return {"unreadable": self._unreadable}

    def load_state(self, sums: Tensor | None, about: Mapping[str, Any]) -> None:
        """Restore what `state` and `about` returned."""
        self._unreadable = int(about.get("unreadable", 0))
        if sums is None or sums[:-1].shape != self._step_metrics.sums.shape:  # another version may have other sums
            return
        self._step_metrics.sums.copy_(sums[:-1])
        self._carried, self._unreadable_before = int(sums[SUMS.index("samples")]), int(sums[-1])

    def _unreadable_here(self) -> int:
        """Samples of this rank that could not be read so far."""
        return self._unreadable_before + self._session.stream.stats().bad


def _peak_memory(device: torch.device) -> float:
    """Bytes: of the GPU, or of the process."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    import resource

    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024
