"""Ranks without a launcher that get several command lines, one after the other: importing torch takes seconds.

    ended = by_hand(folder, [["--cfg", "demo", ...], ...], ranks=2)     # of each case, of each rank: code, stderr

As a program it is one of the ranks:

    python -m tests.e2e.by_hand CASES.json      [[PORT, [ARGUMENT, ...]], ...] -> a line [CODE, STDERR] for each
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
from sopdist.train.place import LAUNCH_VARIABLES
from tests.train.launching import REPOSITORY, free_port


def by_hand(
    folder: Path, cases: Sequence[Sequence[str]], ranks: int = 2, *, apart: bool = False, timeout: float = 150.0
) -> list[list[tuple[int, str]]]:
    """`sopdist train CASE` for each case: exit code and stderr of each rank. `apart`: in a folder of its own each."""
    path, processes = folder / "cases.json", []
    path.write_text(json.dumps([[free_port(), list(case)] for case in cases]))
    try:
        for rank in range(ranks):
            here = folder / str(rank) if rank and apart else folder
            here.mkdir(exist_ok=True)
            environ = {name: value for name, value in os.environ.items() if name not in LAUNCH_VARIABLES} | {
                "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
                "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(REPOSITORY),
            }  # fmt: skip
            command = [sys.executable, "-m", "tests.e2e.by_hand", str(path)]
            processes.append(
                subprocess.Popen(command, cwd=here, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            )
        told = [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    lines = [[json.loads(line) for line in out.decode().splitlines() if line.startswith("[")] for out, _ in told]
    assert [len(rank) for rank in lines] == [len(cases)] * ranks, told
    return [[(code, said) for code, said in case] for case in zip(*lines, strict=True)]


def run_cases(path: Path) -> None:
    for port, case in json.loads(path.read_text()):
        os.environ["MASTER_PORT"] = str(port)
        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            code = main(["train", *case])
        print(json.dumps([code, said.getvalue()]), flush=True)


if __name__ == "__main__":
    run_cases(Path(sys.argv[1]))
