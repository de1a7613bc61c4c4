"""What of torch, CUDA, NCCL, Triton, DALI, DeepSpeed, accelerate, timm, W&B, Slurm and this machine is usable here.

For everything that is not, a line of what to do. Each probe runs in a process of its own: a package that crashes or
hangs is a line of the table. Two of them meet and add numbers, as the ranks of a run would. The exit code is 0 if
training can run here, on the GPUs if there are any, and 1 if not.

    sopdist doctor
    sopdist doctor --json
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import NamedTuple

from .finding import Finding
from .isolation import ask

SECONDS = 60
_LINE = 100  # columns after which advice goes to a line of its own


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `sopdist doctor`."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--timeout", type=_seconds, default=SECONDS, metavar="S", help=f"seconds for everything ({SECONDS})"
    )


def run(args: argparse.Namespace) -> int:
    """Examine, print; 0 if training can run here."""
    found = examine(args.timeout)
    stopping = [finding.what for finding in found if finding.stops]
    device = "GPU" if any(finding.what == "CUDA" and finding.state == "ok" for finding in found) else "CPU"
    if args.json:
        content = {"usable": not stopping, "device": device, "findings": [asdict(finding) for finding in found]}
        print(json.dumps(content, indent=1))
    else:
        print(as_text(found))
        print(f"\ntraining can run here, on the {device}" if not stopping
              else f"\ntraining cannot run here: see {', '.join(stopping)}")  # fmt: skip
    return 1 if stopping else 0


class Probe(NamedTuple):
    """A probe, and what is known of it without an answer."""

    module: str
    name: str
    what: str  # the line of the table, if its process does not answer
    needed: bool = False  # for training
    torch: bool = False  # asks nothing that could be answered without torch


PROBES = (  # in the order of the table
    Probe("packages", "python", "python", needed=True),
    Probe("packages", "torch", "torch", needed=True),
    Probe("talk", "two processes", "two processes", needed=True, torch=True),
    Probe("packages", "accelerate", "accelerate", needed=True, torch=True),
    Probe("packages", "deepspeed", "DeepSpeed", torch=True),
    Probe("packages", "images and configs", "images and configs", needed=True),
    Probe("packages", "kernels", "C kernels", torch=True),
    Probe("packages", "triton", "Triton"),
    Probe("packages", "dali", "DALI"),
    Probe("packages", "timm", "timm", torch=True),
    Probe("packages", "wandb", "W&B"),
    Probe("machine", "CPU cores", "CPU cores"),
    Probe("machine", "disk", "disk", needed=True),
    Probe("machine", "shared memory", "shared memory"),
    Probe("machine", "open files", "open files"),
    Probe("machine", "Slurm", "Slurm"),
)


def examine(seconds: float) -> list[Finding]:
    """What all probes find, within so many seconds."""
    end = time.monotonic() + seconds

    def ask_it(probe: Probe) -> list[Finding]:
        # One that hangs must leave time for the others.
        deadline = min(end, time.monotonic() + seconds / 2)
        return ask(f"{__name__}.{probe.module}", probe.name, deadline, what=probe.what, needed=probe.needed)

    # Two at a time at least, because most of a probe is loading from disk; not all, because each takes memory.
    with ThreadPoolExecutor(max(2, min(8, len(os.sched_getaffinity(0))))) as pool:
        (torch,) = (probe for probe in PROBES if probe.name == "torch")
        answers = {torch: pool.submit(ask_it, torch)}
        others = [probe for probe in PROBES if probe is not torch and not probe.torch]
        others.sort(key=lambda probe: probe.module != "machine")  # what is answered at once does not wait
        answers |= {probe: pool.submit(ask_it, probe) for probe in others}
        usable = not any(finding.stops for finding in answers[torch].result())
        if usable:
            answers |= {probe: pool.submit(ask_it, probe) for probe in PROBES if probe.torch}
        return [
            finding
            for probe in PROBES
            for finding in (answers[probe].result() if probe in answers else [_not_asked(probe)])
        ]


def _not_asked(probe: Probe) -> Finding:
    return Finding(probe.what, "broken", "cannot work without torch", "see torch", probe.needed)


def as_text(found: Sequence[Finding]) -> str:
    """An aligned table; advice that would make a line long stands below it."""
    columns = [("what", "state", "detail"), *((finding.what, finding.state, finding.detail) for finding in found)]
    widths = [max(len(line[column]) for line in columns) for column in range(2)]
    lines = ["  ".join(("what".ljust(widths[0]), "state".ljust(widths[1]), "detail -> advice"))]
    for finding in found:
        start = f"{finding.what.ljust(widths[0])}  {finding.state.ljust(widths[1])}  "
        line = f"{start}{finding.detail}".rstrip()
        if finding.advice:
            together = f"{line} -> {finding.advice}"
            line = together if len(together) <= _LINE else f"{line}\n{' ' * len(start)}-> {finding.advice}"
        lines.append(line)
    return "\n".join(lines)


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 1 <= number <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 1 to 3600")
    return number
