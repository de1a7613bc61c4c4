"""Many small runs that crash, or whose disk fails, and that go on: forked off one process that has imported everything.

    python -m tests.e2e.crashing PLACE TRIALS.json      -> for each trial a line, an `Outcome`

PLACE has shards and `tiny.yaml`; the run of a trial is PLACE/runs/NAME. A process takes seconds to import torch, a fork
milliseconds; but only one that has no threads yet can be forked.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

from sopdist.checkpoint import complete_checkpoints, verify_checkpoint
from sopdist.checkpoint.folder import step_of
from sopdist.data.errors import DataError
from tests.e2e.exactness import last_step
from tests.e2e.file_faults import KILL, inject
from tests.train.grey_images import write_images
from tests.train.launching import REPOSITORY, end_group, free_port

STEPS, INTERVAL, EPOCH = 14, 2, 7
CONFIG = f"""
data: {{root: shards, split: train, recipe: digits, labels: wrong, backend: cpu, threads: 1}}
model: {{name: small_conv}}
objective: {{visits: 1.5}}
optim: {{lr: 0.05}}
train: {{epochs: 2, batch: 9}}
engine: {{threads: 1}}
evaluate: {{splits: {{val: val}}}}
checkpoint: {{steps: {INTERVAL}, keep: 1}}
log: {{every: 1, wandb: 'off'}}
"""
_LONGEST = 60.0  # seconds of one run
_WORKERS = 2
_IMPORTED_LATE = ("torch._dynamo", "accelerate", "yaml", "sopdist.train.loop", "sopdist.train.resume")  # by a run


@dataclass(frozen=True)
class Trial:
    """A run, and what happens to it. Afterwards it goes on, with --resume auto."""

    name: str
    kind: str = ""  # what happens to a file operation of a rank: see file_faults; empty: nothing does
    at: int = 0  # which operation
    count: int = 1  # and how many after it, itself included
    victim: int = 0  # the rank
    killed_after: float = 0.0  # seconds after its first step at which all ranks are killed; 0: not
    ranks: int = 1
    keys: tuple[str, ...] = ()
    again: int = 0  # the operation at which the run is killed once more, when it goes on; then it goes on again


@dataclass(frozen=True)
class Outcome:
    """How a trial went."""

    name: str
    codes: list[int]  # of the ranks; negative: the signal that ended it
    done: list[str]  # file operations of the victim, if it has ended by itself
    told: int  # the last step in metrics.jsonl, when all ranks had ended
    complete: list[int]  # the steps of the checkpoints that looked complete then,
    damaged: list[str] = field(default_factory=list)  # and what was found wrong with any of them
    resumed: list[int] = field(default_factory=list)  # codes of the ranks that went on
    said: str = ""  # by all of them, the first and the second time


def write_place(folder: Path) -> Path:
    write_images(folder / "shards" / "train", 61)
    write_images(folder / "shards" / "val", 30)
    (folder / "tiny.yaml").write_text(CONFIG)
    (folder / "runs").mkdir()  # otherwise the first run would need one operation more than the others
    return folder


def run_trials(place: Path, trials: Sequence[Trial], timeout: float = 540.0) -> list[Outcome]:
    """In a process of their own."""
    path = place / "trials.json"
    path.write_text(json.dumps([asdict(trial) for trial in trials]))
    environ = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environ["PYTHONPATH"] = str(REPOSITORY)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.e2e.crashing", str(place), str(path)], env=environ, text=True,
        start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        end_group(process.pid)
    assert process.returncode == 0, err
    outcomes = [Outcome(**json.loads(line)) for line in out.splitlines()]
    assert [outcome.name for outcome in outcomes] == [trial.name for trial in trials]
    return outcomes


def _outcome(place: Path, trial: Trial) -> Outcome:
    run = place / "runs" / trial.name
    log = place / f"{trial.name}.log"
    codes = _run_ranks(place, trial, log, "none")
    operations = place / f"{trial.name}.done"
    done = json.loads(operations.read_text()) if operations.exists() else []
    complete = complete_checkpoints(run)
    damaged = list(_damaged(complete))
    told, steps = last_step(run), [step_of(folder) for folder in complete]
    if trial.again:
        once_more = replace(trial, kind=KILL, at=trial.again, count=1, killed_after=0.0)
        assert _run_ranks(place, once_more, log, "auto")[trial.victim] == -signal.SIGKILL
        damaged += _damaged(complete_checkpoints(run))
    resumed = _run_ranks(place, replace(trial, kind="", killed_after=0.0), log, "auto")
    return Outcome(trial.name, codes, done, told, steps, damaged, resumed, log.read_text(errors="replace"))


def _damaged(checkpoints: Sequence[Path]) -> Iterator[str]:
    for folder in checkpoints:
        try:
            verify_checkpoint(folder)
        except DataError as error:
            yield str(error)


def _run_ranks(place: Path, trial: Trial, log: Path, resume: str) -> list[int]:
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads must not be forked"
    port = free_port()
    pids = [_fork(partial(_train, place, trial, rank, port, resume), log) for rank in range(trial.ranks)]
    until = time.monotonic() + _LONGEST
    kill_at = float("inf")
    codes: dict[int, int] = {}
    while len(codes) < trial.ranks:
        for rank, pid in enumerate(pids):
            if rank not in codes and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                codes[rank] = os.waitstatus_to_exitcode(ended[1])
        now = time.monotonic()
        if trial.killed_after and kill_at == float("inf") and last_step(place / "runs" / trial.name):
            kill_at = now + trial.killed_after
        if -signal.SIGKILL in codes.values() or now > min(until, kill_at):  # a machine that goes down takes all ranks
            for pid in (pid for rank, pid in enumerate(pids) if rank not in codes):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)
    return [codes[rank] for rank in range(trial.ranks)]


def _fork(work: Callable[[], int], log: Path) -> int:
    """Do it in a process of its own, which ends with the code that it returns and says everything to a file."""
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


def _train(place: Path, trial: Trial, rank: int, port: int, resume: str) -> int:
    from sopdist.train.running import run_config

    os.chdir(place)
    if trial.ranks > 1:
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": trial.ranks, "LOCAL_WORLD_SIZE": trial.ranks}
        os.environ |= {name: str(number) for name, number in numbers.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    faults = None
    if rank == trial.victim:
        faults = inject(place / "runs" / trial.name, trial.kind, trial.at if trial.kind else 0, trial.count)
    keys = [f"run.name={trial.name}", *trial.keys]
    code = run_config("tiny.yaml", keys, resume=resume)
    if faults is not None:
        (place / f"{trial.name}.done").write_text(json.dumps(faults.done))
    return code


def main() -> None:
    """Two workers, each of which takes every other trial: a trial waits for the disk half of the time."""
    for name in _IMPORTED_LATE:
        importlib.import_module(name)
    place = Path(sys.argv[1])
    trials = [Trial(**given | {"keys": tuple(given["keys"])}) for given in json.loads(Path(sys.argv[2]).read_text())]
    parts = [trials[first::_WORKERS] for first in range(_WORKERS)]
    workers = [_fork(partial(_work, place, part), place / f"worker-{number}") for number, part in enumerate(parts)]
    for worker in workers:
        assert os.waitpid(worker, 0)[1] == 0, "".join(path.read_text()[-3000:] for path in place.glob("worker-*"))
    for trial in trials:
        print((place / f"{trial.name}.outcome").read_text())


def _work(place: Path, trials: Sequence[Trial]) -> int:
    for trial in trials:
        (place / f"{trial.name}.outcome").write_text(json.dumps(asdict(_outcome(place, trial))))
    return 0


if __name__ == "__main__":
    main()
