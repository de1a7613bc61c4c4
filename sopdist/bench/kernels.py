"""Compile the CUDA kernels ahead of time for sm_80, sm_90 and sm_100, and list what they became.

Registers a thread, bytes spilled to local memory, and whether a row kernel left the operations that every device
rounds alike. Needs no GPU.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tqdm import tqdm

from ..noise.kernels import aot
from ..text_table import format_table
from .timing import write_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `sopdist bench kernels`."""
    parser.add_argument(
        "--classes", type=int, nargs="+", default=list(aot.CLASSES), help="class counts to specialise for"
    )
    parser.add_argument(
        "--targets", type=int, nargs="+", default=list(aot.TARGETS), help="GPU targets, e.g. 90 for sm_90"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("results/bench_kernels.json"), help="where to write the figures"
    )


def run(args: argparse.Namespace) -> int:
    """Compile, print one line for each kernel with the registers on each target, write JSON; 1 if anything spills."""
    builds = list(aot.builds(tuple(args.classes)))
    usages = [
        aot.compile_build(build, target)
        for build in tqdm(builds, desc="compiling", unit="kernel", file=sys.stderr)
        for target in args.targets
    ]
    write_json(args.out, {"kernels": [usage.as_dict() for usage in usages]})
    rows = []
    for build, first in zip(builds, range(0, len(usages), len(args.targets)), strict=True):
        mine = usages[first : first + len(args.targets)]
        cells = [
            f"{usage.registers}" + (f" + {usage.spilled_bytes} B" if usage.spilled_bytes else "") for usage in mine
        ]
        rows.append([f"{build.kernel} {build.layout} {build.detail}", f"{build.classes:,}", str(build.warps), *cells])
    print(format_table(["registers a thread", "classes", "warps", *(f"sm_{target}" for target in args.targets)], rows))
    spilled = sum(usage.spilled_bytes > 0 for usage in usages)
    inexact = sum(usage.kernel == "rows" and bool(usage.inexact) for usage in usages)
    print(
        f"\n{len(usages)} builds; {spilled} spill; {inexact} row kernels use operations that devices round differently."
    )
    print(f"Figures: {args.out}")
    return 1 if spilled or inexact else 0
