"""Compare methods: train each with the same data, seeds and settings, and print one fair table.

  sopdist compare --cfg cifar10 --methods ce,gce,sop --seeds 3
  sopdist compare --cfg cifar10 --methods ce,sop --seeds 0,5,7 --noise sym-0.4,sym-0.6 train.epochs=60
  sopdist compare --cfg cifar10 --methods ce,gce:q=0.5,gce:q=0.9,sop:optim.lr=0.01,sop@cifar10_plus --out FOLDER

A method is NAME, NAME:key=value:key=value with settings of its own (keys of the section `method`; a key with a dot is
any config key), or NAME@CONFIG with a config of its own. `key=value` at the end applies to all methods. The first
method is the one that the others are compared with.

--noise takes label sets of the training split. One such as sym-0.4 (KIND-RATE, as in `sopdist labels noise`) is created
with seed 0 if it does not exist. So is the same noise for the validation split (evaluate.best, or `val`), unless the
config names a label set for that split in evaluate.label_sets. All methods are checked before the first run starts.

Each run is a training command of its own, in FOLDER/runs/METHOD-LABELS-seedK, and its output is in FOLDER/logs. If you
start the command again, finished runs are skipped and interrupted ones resume; you may add methods, seeds and noise.
Ctrl-C saves the current run. A run that fails is reported, and the others continue.

FOLDER receives table.md, table.csv, results.json (everything, including each run), curves.png and curves.svg. The table
has the test accuracy after the last epoch, mean and standard error over the seeds; the best epoch, which nobody could
select without test labels; the paired difference from the first method; training time; memory per sample; how well
wrong labels are found; and which method noisy validation labels would choose.

With Slurm, one array task per run (docs/slurm.md): --list, then launch/slurm/compare.sbatch, then --table.

exit codes: 0 all runs finished, 1 a run is missing, or error in data or files, 2 error in the config, 130 interrupted
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..arguments import integer

if TYPE_CHECKING:
    from ...compare.plan import Comparison, Run

_MAX_SEED = 2**63 - 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `sopdist compare`."""
    parser.intermixed = True  # type: ignore[attr-defined]
    add = parser.add_argument
    add("overrides", nargs="*", metavar="key=value", help="override config keys, for all methods")
    add("--cfg", required=True, metavar="NAME_OR_PATH", help="config: a path, or a name in configs/")
    methods = "methods: NAME, NAME:key=value or NAME@CONFIG; the others are compared with the first"
    add("--methods", required=True, metavar="A,B", help=methods)
    seeds = "number of seeds (0 to N-1), or the seeds themselves, separated by commas (default 3)"
    add("--seeds", type=_seeds, default=(0, 1, 2), metavar="N|A,B", help=seeds)
    noise = "label sets to train on, such as sym-0.4 (default: that of the config)"
    add("--noise", type=_names, default=(), metavar="A,B", help=noise)
    add("--out", type=Path, metavar="FOLDER", help="folder of the comparison (default: comparisons/CONFIG)")
    test = "split whose accuracy is compared (default: test, or the only one that is not used for validation)"
    add("--test", default="", metavar="SPLIT", help=test)
    launcher = "start each run with this launcher, e.g. 'torchrun --nproc-per-node 8' (default: one process)"
    add("--launcher", default="", metavar="COMMAND", help=launcher)
    dry = "check everything and list the runs, but write nothing; with --task, print the arguments of `sopdist train "
    dry += "--cfg` for this run, one per line"
    add("--dry-run", action="store_true", help=dry)
    parts = parser.add_mutually_exclusive_group()
    listing = "check everything, create missing label sets, and print the number of runs"
    parts.add_argument("--list", action="store_true", help=listing)
    parts.add_argument("--task", type=integer(0), metavar="I", help="train only run I, counted from 0; no table")
    parts.add_argument("--table", action="store_true", help="train nothing; collect the results of finished runs")


def run(args: argparse.Namespace) -> int:
    """Compare; returns the exit code."""
    from ...compare.plan import Request, make_comparison
    from ...compare.record import check_record
    from ...compare.running import train_runs

    out = args.out or Path("comparisons") / Path(args.cfg).stem
    request = Request(args.cfg, args.methods, args.seeds, args.noise, tuple(args.overrides), args.test, out)
    comparison, is_task = make_comparison(request), args.task is not None
    check_record(comparison, part=is_task)
    runs = comparison.runs()
    chosen = [_task(runs, args.task)] if is_task else runs
    if args.dry_run:
        print("\n".join(chosen[0].arguments) if is_task else _listing(comparison))
        return 0
    _set_up(comparison, part=is_task)
    if args.list:
        print(len(runs))
        return 0
    for entry, cost in comparison.costs.items():
        if cost.outlook and not args.table:
            print(f"{entry.text}: {cost.outlook}", file=sys.stderr)
    failed = [] if args.table else train_runs(chosen, args.launcher, runs)
    if is_task:
        return 1 if failed else 0
    return _report(comparison)


def _set_up(comparison: Comparison, *, part: bool) -> None:
    """Create the folder and the label sets, and record what is compared. `part`: see `check_record`."""
    from ...compare.label_sets import create_label_set
    from ...compare.record import check_record, lock_folder, write_record

    config = comparison.config
    with lock_folder(comparison.out):
        for labels in comparison.label_sets:
            if labels.noise:
                create_label_set(config.data, labels.noise, f"--noise {labels.name}")
        for validation in comparison.validations.values():
            validation.create(config)
        check_record(comparison, part=part)  # again, now that all label sets exist
        write_record(comparison, part=part)


def _report(comparison: Comparison) -> int:
    """Print and write the results; returns the exit code."""
    from ...compare.figure import plot_curves
    from ...compare.results import collect
    from ...compare.table import as_text, summary_line, write_tables
    from ...errors import DataError

    found = collect(comparison)
    write_tables(comparison, found)
    print(f"{as_text(comparison, found)}\n\n{summary_line(comparison, found)}")
    try:
        plot_curves(comparison, found)
    except DataError as error:
        print(f"sopdist: no figure: {error}", file=sys.stderr)
    complete = all(len(row.finished) == len(row.runs) for results in found for row in results.rows)
    return 0 if complete else 1


def _listing(comparison: Comparison) -> str:
    """The runs by number, and what would be created."""
    from ...compare.running import status_of
    from ..tables import format_table

    rows = [[str(number), run.name, status_of(run)] for number, run in enumerate(comparison.runs())]
    missing = [f"would create label set {labels.name}" for labels in comparison.label_sets if labels.noise]
    missing += [
        f"would create label set {validation.labels} of {validation.split}"
        for validation in comparison.validations.values()
        if validation.noise
    ]
    return "\n".join([format_table(["task", "run", "status"], rows, left=(1, 2)), *missing])


def _task(runs: list[Run], number: int) -> Run:
    from ...errors import ConfigError

    if number >= len(runs):
        raise ConfigError(f"--task {number}: must be from 0 to {len(runs) - 1}; there are {len(runs)} runs")
    return runs[number]


def _seeds(text: str) -> tuple[int, ...]:
    """Argument type: `3` is 0, 1, 2; `0,5` is 0 and 5."""
    if "," not in text:
        return tuple(range(integer(1, 10_000)(text)))
    seeds = tuple(integer(0, _MAX_SEED)(part.strip()) for part in text.split(","))
    if len(set(seeds)) < len(seeds):
        raise argparse.ArgumentTypeError(f"{text!r} has a seed twice")
    return seeds


def _names(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(","))
    if not all(names):
        raise argparse.ArgumentTypeError(f"{text!r} has an empty name")
    return names
