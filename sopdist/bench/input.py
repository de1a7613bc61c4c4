"""`sopdist bench input`: images a second of the input pipeline, beside stock pipelines on the same shards.

Part 1: both backends, DALI's own webdataset reader, the stock webdataset pipeline (PIL, worker processes), and decoding
and resizing alone, which is the limit. Random resized crops of 224 pixels from JPEGs of about 65 kB, cut out of
photographs that scikit-learn ships. Candidates take turns; each first uses up what it had prepared while it waited.
Part 2: the time to the first batch when an epoch is entered at step 0 and at step 10,000.
Part 3: the plan of 14 million samples: seconds, memory, and how well it shuffles.
At the end, each target and whether it was met.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from .timing import environment, load_warning, write_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `sopdist bench input`."""
    parser.add_argument("--quick", action="store_true", help="a smoke run of some seconds on small sizes")
    parser.add_argument("--cores", type=int, help="threads or workers of each candidate (default: all usable cores)")
    parser.add_argument(
        "--out", type=Path, default=Path("results/bench_input.json"), help="results file (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Measure, print, write the results file; 0 whether or not the targets are met, which is for a person to read."""
    from . import input_rates  # needs the packages of the extra `data`, which other commands do without

    header = environment()
    cores = args.cores or len(os.sched_getaffinity(0))
    print(load_warning(header) or f"{cores} cores", flush=True)
    results = input_rates.measure_all(input_rates.QUICK if args.quick else input_rates.FULL, cores)
    write_json(args.out, results, header)
    print(f"\nwritten to {args.out}")
    return 0
