"""Run many small trainings that crash or whose disk fails, and resume them.

    with TrialRunner(folder) as runner:
        outcomes = runner.run([Trial("first", kind="kill", at=17), ...])

Importing torch takes seconds, a fork milliseconds. A server process therefore imports everything once and forks off the
ranks of each trial; it must not have threads, because only single-threaded processes can be forked safely.

    python -m tests.support.crashing FOLDER      each line of stdin is a list of trials; prints one `Outcome` per line
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from sopdist.checkpoint import complete_checkpoints, verify_checkpoint
from sopdist.checkpoint.folder import step_of
from sopdist.errors import DataError
from tests.support.exactness import last_step
from tests.support.file_faults import KILL, inject
from tests.support.grey_images import write_images
from tests.support.launching import REPOSITORY, free_port, kill_group

STEPS, INTERVAL, EPOCH = 14, 2, 7
CONFIG = f"""
data: {{root: shards, split: train, recipe: digits, labels: wrong, backend: cpu, threads: 1}}
model: {{name: small_conv}}
method: {{visits: 1.5, onset: always}}
optim: {{lr: 0.05}}
train: {{epochs: 2, batch: 9}}
engine: {{threads: 1}}
evaluate: {{splits: {{val: val}}}}
checkpoint: {{steps: {INTERVAL}, keep: 1}}
log: {{every: 1, wandb: 'off'}}
"""
_LONGEST = 60.0  # seconds for one run
_IMPORTED_LATE = (  # by a run
    "torch._dynamo",
    "accelerate",
    "yaml",
    "sopdist.train.loop",
    "sopdist.train.saving.resume",
)


@dataclass(frozen=True)
class Trial:
    """A run and its fault. Afterwards the run is resumed with --resume auto."""

    name: str
    kind: str = ""  # fault of a file operation: see file_faults; empty: none
    at: int = 0  # first operation that is affected, counted from 1
    count: int = 1  # number of operations that are affected
    victim: int = 0  # rank that is affected
    killed_after: float = 0.0  # seconds after step `after_step` at which all ranks are killed; 0: never
    after_step: int = 1
    ranks: int = 1
    keys: tuple[str, ...] = ()
    again: int = 0  # operation at which the resumed run is killed; then it is resumed once more


@dataclass(frozen=True)
class Outcome:
    """The result of a trial."""

    name: str
    codes: list[int]  # exit codes of the ranks; negative: the signal that killed the rank
    operations: list[str]  # file operations of the victim, if it was not killed
    last_step: int  # in metrics.jsonl, after all ranks had ended
    complete: list[int]  # steps of the checkpoints that looked complete then
    damaged: list[str] = field(default_factory=list)  # errors found in any of them
    resumed: list[int] = field(default_factory=list)  # exit codes of the ranks of the resumed run
    log: str = ""  # output of all ranks, before and after the crash


class TrialRunner:
    """Runs trials in a server process, which is started when it is needed."""

    def __init__(self, workspace: Path) -> None:
        self.workspace = workspace
        self._server: subprocess.Popen[str] | None = None
        write_images(workspace / "shards" / "train", 61)
        write_images(workspace / "shards" / "val", 30)
        (workspace / "tiny.yaml").write_text(CONFIG)
        (workspace / "runs").mkdir()  # otherwise the first run would need one operation more than the others

    def __enter__(self) -> TrialRunner:
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            kill_group(self._server.pid)
            self._server.wait()

    def run_of(self, trial: Trial) -> Path:
        return self.workspace / "runs" / trial.name

    def run(self, trials: Sequence[Trial], timeout: float = 300.0) -> list[Outcome]:
        server = self._running_server()
        assert server.stdin is not None
        assert server.stdout is not None
        timer = threading.Timer(timeout, kill_group, [server.pid])
        timer.start()
        try:
            server.stdin.write(json.dumps([asdict(trial) for trial in trials]) + "\n")
            server.stdin.flush()
            lines = [server.stdout.readline() for _ in trials]
        finally:
            timer.cancel()
        errors = (self.workspace / "server.err").read_text()[-3000:]
        assert all(lines), f"the server has ended with code {server.wait()}:\n{errors}"
        outcomes = [Outcome(**json.loads(line)) for line in lines]
        assert [outcome.name for outcome in outcomes] == [trial.name for trial in trials]
        return outcomes

    def _running_server(self) -> subprocess.Popen[str]:
        if self._server is None or self._server.poll() is not None:
            environ = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
            environ["PYTHONPATH"] = str(REPOSITORY)
            with (self.workspace / "server.err").open("w") as errors:
                self._server = subprocess.Popen(
                    [sys.executable, "-m", "tests.support.crashing", str(self.workspace)], env=environ, text=True,
                    start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                )  # fmt: skip
        return self._server


# --- the server ------------------------------------------------------------------------------------------------------


def main() -> None:
    for name in _IMPORTED_LATE:
        importlib.import_module(name)
    workspace = Path(sys.argv[1])
    while line := sys.stdin.readline():
        trials = [Trial(**values | {"keys": tuple(values["keys"])}) for values in json.loads(line)]
        for trial in trials:
            print(json.dumps(asdict(_outcome(workspace, trial))), flush=True)


def _outcome(workspace: Path, trial: Trial) -> Outcome:
    run = workspace / "runs" / trial.name
    log = workspace / f"{trial.name}.log"
    codes = _run_ranks(workspace, trial, log, "none")
    path = workspace / f"{trial.name}.operations"
    operations = json.loads(path.read_text()) if path.exists() else []
    complete = complete_checkpoints(run)
    damaged = list(_errors_in(complete))
    step, steps = last_step(run), [step_of(folder) for folder in complete]
    if trial.again:
        once_more = replace(trial, kind=KILL, at=trial.again, count=1, killed_after=0.0)
        assert _run_ranks(workspace, once_more, log, "auto")[trial.victim] == -signal.SIGKILL
        damaged += _errors_in(complete_checkpoints(run))
    resumed = _run_ranks(workspace, replace(trial, kind="", killed_after=0.0), log, "auto")
    return Outcome(trial.name, codes, operations, step, steps, damaged, resumed, log.read_text(errors="replace"))


def _errors_in(checkpoints: Sequence[Path]) -> Iterator[str]:
    for folder in checkpoints:
        try:
            verify_checkpoint(folder)
        except DataError as error:
            yield str(error)


def _run_ranks(workspace: Path, trial: Trial, log: Path, resume: str) -> list[int]:
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads must not be forked"
    port = free_port()
    pids = [_fork(partial(_train, workspace, trial, rank, port, resume), log) for rank in range(trial.ranks)]
    until = time.monotonic() + _LONGEST
    kill_at = float("inf")
    interval = 0.001 if trial.killed_after or trial.ranks > 1 else 0.01  # short where ranks must be killed in time
    codes: dict[int, int] = {}
    while len(codes) < trial.ranks:
        for rank, pid in enumerate(pids):
            if rank not in codes and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                codes[rank] = os.waitstatus_to_exitcode(ended[1])
        now = time.monotonic()
        if (
            trial.killed_after
            and kill_at == float("inf")
            and last_step(workspace / "runs" / trial.name) >= trial.after_step
        ):
            kill_at = now + trial.killed_after
        if -signal.SIGKILL in codes.values() or now > min(until, kill_at):  # a machine that goes down kills all ranks
            for pid in (pid for rank, pid in enumerate(pids) if rank not in codes):
                os.kill(pid, signal.SIGKILL)
        time.sleep(interval)
    return [codes[rank] for rank in range(trial.ranks)]


def _fork(work: Callable[[], int], log: Path) -> int:
    """Run a function in a child process that exits with its result and writes all output to a file."""
    pid = os.fork()
    if pid:
        return pid
    code = 99
    with suppress(BaseException):
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, 1)
        os.dup2(file, 2)
        try:
            code = work()
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _train(workspace: Path, trial: Trial, rank: int, port: int, resume: str) -> int:
    from sopdist.train.run import run_config

    os.chdir(workspace)
    if trial.ranks > 1:
        variables: dict[str, Any] = {"RANK": rank, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        variables |= {"WORLD_SIZE": trial.ranks, "LOCAL_WORLD_SIZE": trial.ranks}
        os.environ |= {name: str(value) for name, value in variables.items()}
    faults = None
    if rank == trial.victim:
        faults = inject(workspace / "runs" / trial.name, trial.kind, trial.at if trial.kind else 0, trial.count)
    code = run_config("tiny.yaml", [f"run.name={trial.name}", *trial.keys], resume=resume)
    if faults is not None:
        (workspace / f"{trial.name}.operations").write_text(json.dumps(faults.operations))
    return code


if __name__ == "__main__":
    main()
