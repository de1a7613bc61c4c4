"""`sopdist bench checkpoint`: what it costs to save a run and to go on with it.

Part 1: how long training stands still for a save in the background, beside one that it waits for and beside torch.save;
        bytes, and how much slower steps are meanwhile.
Part 2: bytes of the noise table in a checkpoint, in both layouts.
Part 3: time to the first batch after a resume, early and late in an epoch, beside reading again what came before.
At the end, each target and whether it was met.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from ..checkpoint.tensor_file import write_tensors
from ..data.commands.arguments import whole
from ..noise.rows import NoiseTable
from ..text_table import format_table
from .checkpoint_turns import BACKGROUND, NOW, TORCH, SaveTime, Sizes, measure
from .ranks import RankError, run_on_ranks
from .resume_times import first_batches
from .timing import environment, load_warning, write_json
from .turns import Ratio, paired_ratio
from .verdict import Verdict

MOST_STILL, MOST_TABLE, MOST_LATER = 0.1, 1 / 40, 1.25
CLASSES = 1000
_TABLE_ROWS = 2000
_TIMEOUT = 900.0  # seconds for the whole run


def stood_still(ranks: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """Seconds of each round that training stood still: of the rank that stood longest, as the others wait for it."""
    rounds = zip(*(rank["turns"][name] for rank in ranks), strict=True)
    return [max(SaveTime(*turn).stood_still for turn in turns) for turns in rounds]


def table_bytes(classes: int, folder: Path) -> dict[str, float]:
    """Bytes of a row in a checkpoint's file, by layout."""
    found = {}
    for layout in ("slots", "dense"):
        table = NoiseTable(_TABLE_ROWS, classes, layout=layout)
        found[layout] = write_tensors(folder / layout, table.state_dict()).size / _TABLE_ROWS
    return found


def judge(still: Ratio | None, table: Mapping[str, float], later: float | None) -> list[Verdict]:
    """The targets. Bytes depend on no machine; times are only judged if the run was long enough for them."""
    share = table["slots"] / table["dense"]
    verdicts = [
        Verdict("table in slots <= 1/40 of dense, 1,000 classes", f"1/{1 / share:.1f}", share <= MOST_TABLE),
        Verdict("training stands still <= 0.1 x of a save that it waits for", "", None),
        Verdict("first batch after a resume late in an epoch <= 1.25 x of one at its start", "", None),
    ]
    if still is not None:
        undecided = still.median_from <= MOST_STILL < still.median_to  # the median of another run may be on either side
        verdicts[1] = Verdict(verdicts[1].target, str(still), None if undecided else still.median <= MOST_STILL)
    if later is not None:
        verdicts[2] = Verdict(verdicts[2].target, f"{later:.2f} x", later <= MOST_LATER)
    return verdicts


def _save_table(ranks: Sequence[Mapping[str, Any]]) -> str:
    written = sum(rank["bytes"] for rank in ranks)
    rows = []
    for name in (BACKGROUND, NOW, TORCH):
        turns = [SaveTime(*turn) for rank in ranks for turn in rank["turns"][name]]
        seconds = median(turn.whole for turn in turns)
        slower = median(turn.step_meanwhile / turn.step_before for turn in turns)
        rows.append(
            [
                name,
                f"{median(stood_still(ranks, name)) * 1e3:.0f}",
                f"{seconds * 1e3:.0f}",
                f"{written / seconds / 1e6:.0f}",
                f"{slower:.2f} x" if slower else "",
            ]
        )
    return format_table(["save", "stands still, ms", "until it is done, ms", "MB/s", "steps meanwhile"], rows)


def _resume_table(found: Mapping[int, Sequence[float]], whole_epoch: float) -> str:
    steps = max(found) + 1
    rows = [
        [f"step {step} of {steps}", f"{median(seconds) * 1e3:.0f}", f"{whole_epoch * step / steps * 1e3:.0f}"]
        for step, seconds in found.items()
    ]
    return format_table(["goes on at", "first batch, ms", "reading what came before, ms"], rows)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `sopdist bench checkpoint`."""
    parser.add_argument("--quick", action="store_true", help="a smoke run of some seconds on a small network")
    parser.add_argument("--ranks", type=whole(1), default=2, help="processes that save together (default: 2)")
    parser.add_argument("--network", default="preact_resnet18", help="whose state is saved (default: %(default)s)")
    where = "write checkpoints there: another disk, another result (default: a temporary folder)"
    parser.add_argument("--folder", type=Path, help=where)
    out = Path("results/bench_checkpoint.json")
    parser.add_argument("--out", type=Path, default=out, help="results file (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Measure, print, write the results file; 0 whether or not the targets are met, which is for a person to read."""
    header = environment()
    if warning := load_warning(header):
        print(warning, flush=True)
    with tempfile.TemporaryDirectory(prefix="sopdist-bench-", dir=args.folder) as name:
        sizes = Sizes(
            name, network="small_conv" if args.quick else args.network, batch=4, classes=CLASSES,
            samples=1000 if args.quick else 400_000, seconds=1.0 if args.quick else 60.0, fewest=2 if args.quick else 7,
        )  # fmt: skip
        try:
            ranks = run_on_ranks(measure, sizes, args.ranks, timeout=_TIMEOUT)
        except RankError as error:
            print(f"sopdist: {error}", file=sys.stderr)
            return 1
        table = table_bytes(CLASSES, Path(name))
    found, whole_epoch = first_batches(*((64, 8, 1) if args.quick else (1536, 16, 7)))
    written = sum(rank["bytes"] for rank in ranks)
    still = paired_ratio(stood_still(ranks, BACKGROUND), stood_still(ranks, NOW))
    later = median(found[max(found)]) / median(found[0])
    print(f"{args.ranks} ranks ({ranks[0]['device']}), {sizes.network}, {sizes.samples:,} rows of {CLASSES:,} classes:")
    print(f"{written / 1e6:.1f} MB a checkpoint, medians of {still.rounds} rounds")
    print(_save_table(ranks))
    print(f"\nbytes of a row of the table: slots {table['slots']:.1f}, dense {table['dense']:.1f}")
    print(f"\n{_resume_table(found, whole_epoch)}")
    verdicts = judge(None if args.quick else still, table, None if args.quick else later)
    print("", *verdicts, sep="\n")
    results = {
        "ranks": args.ranks,
        "sizes": {key: value for key, value in asdict(sizes).items() if key != "folder"},
        "device": ranks[0]["device"],
        "bytes": written,
        "saves": {name: [rank["turns"][name] for rank in ranks] for name in (BACKGROUND, NOW, TORCH)},
        "stood_still": asdict(still),
        "table_bytes_a_row": table,
        "first_batch": {str(step): seconds for step, seconds in found.items()},
        "whole_epoch": whole_epoch,
        "verdicts": [asdict(verdict) for verdict in verdicts],
    }
    write_json(args.out, results, header)
    print(f"\nwritten: {args.out}")
    return 0
