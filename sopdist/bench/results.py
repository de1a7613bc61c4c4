"""Code that every benchmark shares: the environment of the run, its verdicts and its results file.

Independent of what is measured.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import sopdist

from ..cli.output import cannot_write, write_json


@dataclass(frozen=True)
class Verdict:
    """A target, the measured value, and whether the target was met; None if this run cannot decide it."""

    target: str
    measured: str
    met: bool | None

    def __str__(self) -> str:
        if self.met is None:
            return f"not measured  {self.target}"
        return f"{'met' if self.met else 'MISSED':<12}  {self.target}: {self.measured}"


def add_out(parser: argparse.ArgumentParser, name: str) -> None:
    """Add `--out`, the path of the results file of benchmark `name`."""
    path = Path(f"results/bench_{name}.json")
    parser.add_argument("--out", type=Path, default=path, help="results file (default: %(default)s)")


def start_bench() -> dict[str, Any]:
    """Return the environment of the run, and print a warning if the machine is busy.

    Call this before the benchmark itself puts load on the machine.
    """
    load, cores = round(os.getloadavg()[0], 2), os.cpu_count() or 1
    if load >= 0.5 * cores:
        print(f"machine busy at the start (load {load} on {cores} cores): expect noisy numbers", flush=True)
    return {
        "sopdist": sopdist.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu_count": cores,
        "threads": torch.get_num_threads(),
        "load": load,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def finish_bench(
    out: Path, environment: Mapping[str, Any], results: Mapping[str, Any], verdicts: Sequence[Verdict] = ()
) -> None:
    """Print the verdicts and write everything to the results file."""
    content = {"environment": environment, **results}
    if verdicts:
        print("", *verdicts, sep="\n")
        content["verdicts"] = [asdict(verdict) for verdict in verdicts]
    with cannot_write(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    write_json(out, content)
    print(f"\nresults: {out}")
