"""Check which of torch, CUDA, NCCL, Triton, DALI, DeepSpeed, accelerate, timm, W&B and Slurm work on this machine.

Everything that does not work comes with advice. Each probe runs in its own process, so a package that crashes or hangs
is one line of the table. One probe starts two processes that communicate as ranks do. The exit code is 0 if training
can run here (on the GPUs, if there are any), otherwise 1.

    sopdist doctor
    sopdist doctor --json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import NamedTuple

from ..cli.tables import format_table
from ..cores import usable_cores
from .finding import Finding
from .isolation import run_probe

SECONDS = 60
_MAX_WIDTH = 100  # columns; advice that does not fit goes on its own line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `sopdist doctor`."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--timeout", type=_seconds, default=SECONDS, metavar="S", help=f"seconds for all probes together ({SECONDS})"
    )


def run(args: argparse.Namespace) -> int:
    """Run all probes and print the findings. Returns 0 if training can run here."""
    findings = examine(args.timeout)
    blocking = [finding.what for finding in findings if finding.blocks_training]
    device = "GPU" if any(finding.what == "CUDA" and finding.state == "ok" for finding in findings) else "CPU"
    if args.json:
        content = {"usable": not blocking, "device": device, "findings": [asdict(finding) for finding in findings]}
        print(json.dumps(content, indent=1))
    else:
        print(format_findings(findings))
        print(f"\ntraining can run here, on the {device}" if not blocking
              else f"\ntraining cannot run here: see {', '.join(blocking)}")  # fmt: skip
    return 1 if blocking else 0


class Probe(NamedTuple):
    """A probe, and the description of its finding in case its process fails."""

    module: str
    function: str
    what: str
    needed: bool = False  # for training
    needs_torch: bool = False  # run only if torch works


PROBES = (  # in the order of the table
    Probe("packages", "probe_python", "python", needed=True),
    Probe("packages", "probe_torch", "torch", needed=True),
    Probe("communication", "probe_two_processes", "two processes", needed=True, needs_torch=True),
    Probe("packages", "probe_accelerate", "accelerate", needed=True, needs_torch=True),
    Probe("packages", "probe_deepspeed", "DeepSpeed", needs_torch=True),
    Probe("packages", "probe_images_and_configs", "images and configs", needed=True),
    Probe("packages", "probe_kernels", "C kernels", needs_torch=True),
    Probe("packages", "probe_triton", "Triton"),
    Probe("packages", "probe_dali", "DALI"),
    Probe("packages", "probe_timm", "timm", needs_torch=True),
    Probe("packages", "probe_wandb", "W&B"),
    Probe("machine", "probe_cores", "CPU cores"),
    Probe("machine", "probe_disk", "disk", needed=True),
    Probe("machine", "probe_shared_memory", "shared memory"),
    Probe("machine", "probe_open_files", "open files"),
    Probe("machine", "probe_slurm", "Slurm"),
)


def examine(seconds: float) -> list[Finding]:
    """Run all probes within this many seconds and return their findings."""
    end = time.monotonic() + seconds

    def start(probe: Probe) -> list[Finding]:
        # A probe that hangs must leave time for the others.
        deadline = min(end, time.monotonic() + seconds / 2)
        module = f"{__name__}.{probe.module}"
        return run_probe(module, probe.function, deadline, what=probe.what, needed=probe.needed)

    # At least two at a time, because probes mostly wait for the disk; not all, because each needs memory.
    with ThreadPoolExecutor(max(2, min(8, usable_cores()))) as pool:
        (torch,) = (probe for probe in PROBES if probe.what == "torch")
        results = {torch: pool.submit(start, torch)}
        others = [probe for probe in PROBES if probe is not torch and not probe.needs_torch]
        others.sort(key=lambda probe: probe.module != "machine")  # fast probes first
        results |= {probe: pool.submit(start, probe) for probe in others}
        if not any(finding.blocks_training for finding in results[torch].result()):
            results |= {probe: pool.submit(start, probe) for probe in PROBES if probe.needs_torch}
        return [
            finding
            for probe in PROBES
            for finding in (results[probe].result() if probe in results else [_skipped(probe)])
        ]


def _skipped(probe: Probe) -> Finding:
    return Finding(probe.what, "broken", "does not work without torch", "see torch", probe.needed)


def format_findings(findings: Sequence[Finding]) -> str:
    """An aligned table. Advice that would make a line too long goes on the next line."""
    first = zip(("what", "state"), *((finding.what, finding.state) for finding in findings), strict=True)
    indent = sum(max(map(len, column)) + 2 for column in first)
    rows = [("what", "state", "detail -> advice")]
    for finding in findings:
        advice = f"-> {finding.advice}" if finding.advice else ""
        line = f"{finding.detail} {advice}".rstrip()
        if advice and indent + len(line) > _MAX_WIDTH:
            rows += [(finding.what, finding.state, finding.detail), ("", "", advice)]
        else:
            rows.append((finding.what, finding.state, line))
    return format_table(None, rows, left=(0, 1, 2))


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 1 <= number <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 1 to 3600")
    return number
