"""Train the runs of a comparison, one after the other, each with the usual training command in a process of its own.

Finished runs are skipped and interrupted ones resume. A run that fails does not stop the others.
"""

from __future__ import annotations

import json
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tqdm import tqdm

from ..cli.commands.stop import ask_to_stop
from ..cli.output import cannot_write, progress_bar
from ..cli.units import pluralize
from ..errors import DataError
from ..launching import end_of_log, kill_tree, launch_environ, stop_on_signals
from ..train.record.exit_status import FINISHED, read_exit_status
from ..train.record.run_folder import METRICS, SUMMARY_JSON
from .plan import Run

JOB_TYPE = "compare"  # in W&B
_MODULE = ("-m", "sopdist", "train")
_AS_MODULE = {"deepspeed": ("--no_local_rank", "--module", *_MODULE[1:]), "torchrun": _MODULE, "accelerate": _MODULE}
_POLL_SECONDS = 0.5
_TAIL_BYTES = 1 << 18  # of metrics.jsonl, to find its last line


def status_of(run: Run) -> str:
    """`finished`, or why not: `not started`, `running`, `preempted`, or the error that ended the run."""
    try:
        return read_exit_status(run.folder / SUMMARY_JSON)
    except DataError:
        pass
    with suppress(OSError):
        lines = [line for line in run.log.read_text(errors="replace").splitlines() if line.startswith("sopdist: ")]
        if lines:
            return lines[-1].removeprefix("sopdist: ")
    return "not started"


def is_finished(run: Run) -> bool:
    """Whether the run's summary says so."""
    return status_of(run) == FINISHED


def train_runs(runs: Sequence[Run], launcher: str = "", total: Sequence[Run] | None = None) -> list[Run]:
    """Train all runs that are not finished; returns those that failed. Prints progress to stderr.

    `launcher` starts the ranks of each run; empty: one process. `total`: all runs of the comparison; default: `runs`.
    """
    started, failed, seconds = time.monotonic(), list[Run](), dict[Run, float]()
    all_runs = runs if total is None else total
    done = sum(is_finished(run) for run in runs)
    if done:
        _print(f"{pluralize(done, 'run')} of {len(runs)} {'is' if done == 1 else 'are'} finished already")
    for number, run in enumerate(all_runs, 1):
        if run not in runs or is_finished(run):
            continue
        before = time.monotonic()
        elapsed = f"{tqdm.format_interval(before - started)} elapsed"
        _print(f"run {number} of {len(all_runs)}: {run.name} ({elapsed}{_remaining(runs, failed, seconds)})")
        code = train_process(run, launcher)
        seconds[run] = time.monotonic() - before
        if not is_finished(run):  # the exit code alone is unreliable: launchers change it
            failed.append(run)
            _print(f"run {run.name} has failed (exit code {code}); end of {run.log}:\n{_end_of(run.log)}\n")
    return failed


def train_process(run: Run, launcher: str) -> int:
    """Train a run in a process of its own, until it ends; returns its exit code.

    On Ctrl-C, the run saves a checkpoint before it exits; a second Ctrl-C kills it.
    """
    command = training_command(run, launcher)
    with cannot_write(run.log):
        run.log.parent.mkdir(parents=True, exist_ok=True)
        log = run.log.open("a")
    with log, stop_on_signals():
        print(f"$ {shlex.join(command)}", file=log, flush=True)
        environ = training_environ(run, launcher)
        try:
            # In its own session, so that Ctrl-C reaches only this process.
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ, start_new_session=True
            )
        except OSError as error:
            raise DataError(f"--launcher {launcher}: {command[0]} cannot be started: {error.strerror}") from None
        try:
            return _wait(process, run)
        except KeyboardInterrupt:
            _save_and_stop(process, run)
            print("to resume, start the same command again", file=sys.stderr)
            raise
        finally:
            kill_tree(process)


def training_command(run: Run, launcher: str = "") -> list[str]:
    """`python -m sopdist train`, or the same with a launcher in front."""
    words = shlex.split(launcher)
    program = _AS_MODULE.get(Path(words[0]).name, (sys.executable, *_MODULE)) if words else (sys.executable, *_MODULE)
    return [*words, *program, "--cfg", *run.arguments, "--resume", "auto"]


def training_environ(run: Run, launcher: str) -> dict[str, str]:
    """The environment of a run. In W&B, the runs of a comparison are a group."""
    environ = launch_environ()
    environ.setdefault("WANDB_RUN_GROUP", run.folder.absolute().parent.parent.name)
    environ.setdefault("WANDB_JOB_TYPE", JOB_TYPE)
    if launcher:
        environ.setdefault("OMP_NUM_THREADS", "1")  # avoids a long warning from torchrun; each rank sets its own number
    return environ


def _wait(process: subprocess.Popen[bytes], run: Run) -> int:
    """Wait for the process, and show how many epochs are done."""
    shown = sys.stderr.isatty()
    with progress_bar(total=run.epochs, desc=run.name, unit="epoch", leave=False, disable=not shown) as bar:
        while True:
            with suppress(subprocess.TimeoutExpired):
                return process.wait(_POLL_SECONDS)
            if shown:
                bar.update(_epochs_done(run.folder / METRICS) - bar.n)


def _save_and_stop(process: subprocess.Popen[bytes], run: Run) -> None:
    try:
        ask_to_stop(run.folder)
    except DataError:  # it has not started to train: there is nothing to save
        return
    _print(f"\n{run.name} saves a checkpoint and stops; press Ctrl-C again to kill it")
    with suppress(KeyboardInterrupt):
        process.wait()


def _epochs_done(path: Path) -> int:
    """The number of finished epochs, from the last line of metrics.jsonl: a `train` line does not end its epoch."""
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        for line in reversed(file.read().splitlines()):
            with suppress(ValueError, KeyError, TypeError):
                record = json.loads(line)
                return int(record["epoch"]) + (record["kind"] != "train")
    return 0


def _remaining(runs: Sequence[Run], failed: Sequence[Run], measured: Mapping[Run, float]) -> str:
    """`, about 01:20 left`, from how long the finished runs took, those of the same method if possible.

    `measured`: seconds of the runs that this command trained; those of earlier runs are in their summaries.
    """
    seconds: dict[str, list[float]] = {}
    waiting = [run for run in runs if run not in failed and not is_finished(run)]
    for run in runs:
        if run in measured:
            seconds.setdefault(run.entry.name, []).append(measured[run])
        elif run not in waiting:
            with suppress(OSError, ValueError, KeyError, TypeError):
                summary = json.loads((run.folder / SUMMARY_JSON).read_text())
                seconds.setdefault(run.entry.name, []).append(float(summary["seconds"]))
    if not seconds:
        return ""
    typical = statistics.median(value for values in seconds.values() for value in values)
    left = sum(statistics.median(seconds.get(run.entry.name, [typical])) for run in waiting)
    return f", about {tqdm.format_interval(left)} left"


def _end_of(log: Path) -> str:
    try:
        return end_of_log(log)
    except OSError as error:
        return f"  cannot be read: {error.strerror}"


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
