"""`sopdist bench input`: images/s of the input pipeline, against stock pipelines on the same shards.

Part 1: throughput of both backends, DALI's own webdataset reader, the stock webdataset pipeline (PIL, worker
        processes), and decoding and resizing alone, which is the upper limit. Random resized crops of 224 pixels from
        JPEGs of about 65 kB, cropped from photographs that scikit-learn ships. The candidates take turns; each one
        first drains the batches that it prefetched while it was idle.
Part 2: time to the first batch when an epoch starts at step 0 and at step 10,000.
Part 3: the plan of 14 million samples: seconds, memory and shuffle quality.

The output ends with each target and whether it was met.
"""

from __future__ import annotations

import argparse

from ..cores import usable_cores
from .results import add_out, finish_bench, start_bench


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `sopdist bench input`."""
    parser.add_argument("--quick", action="store_true", help="smoke test of a few seconds on small sizes")
    parser.add_argument("--cores", type=int, help="threads or workers per candidate (default: all usable cores)")
    add_out(parser, "input")


def run(args: argparse.Namespace) -> int:
    """Measure, print and write the results file. Returns 0 whether or not the targets are met."""
    from . import input_rates  # needs the packages of the extra `data`, which --help can do without

    environment = start_bench()
    cores = args.cores or usable_cores()
    print(f"{cores} cores", flush=True)
    results, verdicts = input_rates.measure_all(input_rates.QUICK if args.quick else input_rates.FULL, cores)
    finish_bench(args.out, environment, results, verdicts)
    return 0
