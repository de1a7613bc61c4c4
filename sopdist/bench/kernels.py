"""`sopdist bench kernels`: compile the CUDA kernels ahead of time for sm_80, sm_90 and sm_100.

Lists the registers per thread, the bytes spilled to local memory, and whether a row kernel uses operations that not
every device rounds identically. Needs no GPU.
"""

from __future__ import annotations

import argparse
import sys

from tqdm import tqdm

from ..cli.tables import format_table
from ..noise.kernels import aot
from .results import add_out, finish_bench, start_bench


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `sopdist bench kernels`."""
    parser.add_argument(
        "--classes", type=int, nargs="+", default=list(aot.CLASSES), help="class counts to specialise for"
    )
    parser.add_argument(
        "--targets", type=int, nargs="+", default=list(aot.TARGETS), help="GPU targets, e.g. 90 for sm_90"
    )
    add_out(parser, "kernels")


def run(args: argparse.Namespace) -> int:
    """Compile, print one line per kernel, write the results file. Returns 1 if a kernel spills or is inexact."""
    environment = start_bench()
    builds = list(aot.builds(tuple(args.classes)))
    usages = [
        aot.compile_build(build, target)
        for build in tqdm(builds, desc="compiling", unit="kernel", file=sys.stderr)
        for target in args.targets
    ]
    rows = []
    for build, first in zip(builds, range(0, len(usages), len(args.targets)), strict=True):
        cells = [
            f"{usage.registers}" + (f" + {usage.spilled_bytes} B" if usage.spilled_bytes else "")
            for usage in usages[first : first + len(args.targets)]
        ]
        rows.append([f"{build.kernel} {build.layout} {build.detail}", f"{build.classes:,}", str(build.warps), *cells])
    header = ["registers per thread", "classes", "warps", *(f"sm_{target}" for target in args.targets)]
    print(format_table(header, rows))
    spilled = sum(usage.spilled_bytes > 0 for usage in usages)
    inexact = sum(usage.kernel == "rows" and bool(usage.inexact) for usage in usages)
    print(
        f"\n{len(usages)} builds; {spilled} spill; {inexact} row kernels use operations that devices round differently."
    )
    finish_bench(args.out, environment, {"kernels": [usage.as_dict() for usage in usages]})
    return 1 if spilled or inexact else 0
