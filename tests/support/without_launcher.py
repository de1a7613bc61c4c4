"""Run ranks without a launcher, several command lines in the same processes, because importing torch takes seconds.

    results = run_without_launcher(folder, [["--cfg", "demo", ...], ...], ranks=2)
    code, stderr = results[case][rank]

As a program it is one of the ranks:

    python -m tests.support.without_launcher CASES.json    [[PORT, [ARGUMENT, ...]], ...] -> one [CODE, STDERR] per line
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from sopdist.cli import main
from sopdist.train.distributed.launch_env import LAUNCH_VARIABLES
from tests.support.launching import REPOSITORY, free_port


def run_without_launcher(
    folder: Path, cases: Sequence[Sequence[str]], ranks: int = 2, *, apart: bool = False, timeout: float = 150.0
) -> list[list[tuple[int, str]]]:
    """Run `sopdist train CASE` for each case and return the exit code and stderr of each rank.

    With `apart=True` each rank has its own working directory.
    """
    path, processes = folder / "cases.json", []
    path.write_text(json.dumps([[free_port(), list(case)] for case in cases]))
    try:
        for rank in range(ranks):
            cwd = folder / str(rank) if rank and apart else folder
            cwd.mkdir(exist_ok=True)
            environ = {name: value for name, value in os.environ.items() if name not in LAUNCH_VARIABLES} | {
                "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
                "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(REPOSITORY),
            }  # fmt: skip
            command = [sys.executable, "-m", "tests.support.without_launcher", str(path)]
            processes.append(
                subprocess.Popen(command, cwd=cwd, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            )
        outputs = [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    lines = [[json.loads(line) for line in out.decode().splitlines() if line.startswith("[")] for out, _ in outputs]
    assert [len(rank) for rank in lines] == [len(cases)] * ranks, outputs
    return [[(code, stderr) for code, stderr in case] for case in zip(*lines, strict=True)]


def run_cases(path: Path) -> None:
    for port, case in json.loads(path.read_text()):
        os.environ["MASTER_PORT"] = str(port)
        stderr = io.StringIO()
        with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(io.StringIO()):
            code = main(["train", *case])
        print(json.dumps([code, stderr.getvalue()]), flush=True)


if __name__ == "__main__":
    run_cases(Path(sys.argv[1]))
