"""`sopdist bench checkpoint`: the cost of saving and resuming a run.

Part 1: how long a background save blocks training, against a synchronous save and torch.save; the bytes written, and
        how much slower training steps are during a background save.
Part 2: bytes of the noise table in a checkpoint, in both layouts.
Part 3: time to the first batch after a resume, early and late in an epoch, against reading all earlier batches again.

The output ends with each target and whether it was met.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from ..checkpoint.tensor_file import write_tensors
from ..cli.arguments import integer
from ..cli.tables import format_table
from ..cli.units import format_bytes
from ..noise.rows import NoiseTable
from .checkpoint_resume import first_batches
from .checkpoint_turns import BACKGROUND, SYNCHRONOUS, TORCH, SaveTime, Sizes, measure
from .ranks import run_on_ranks
from .results import Verdict, add_out, finish_bench, start_bench
from .timing import Ratio, paired_ratio

MAX_BLOCKED, MAX_TABLE_SHARE, MAX_RESUME = 0.1, 1 / 40, 1.25
CLASSES = 1000

_TABLE_ROWS = 2000
_TIMEOUT = 900.0  # seconds for the run


def blocked_seconds(ranks: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """Seconds per round that training was blocked: the maximum over the ranks, as they wait for each other."""
    rounds = zip(*(rank["turns"][name] for rank in ranks), strict=True)
    return [max(SaveTime(*turn).blocked for turn in turns) for turns in rounds]


def table_bytes(classes: int, folder: Path) -> dict[str, float]:
    """Bytes per row in a checkpoint file, by layout."""
    found = {}
    for layout in ("slots", "dense"):
        table = NoiseTable(_TABLE_ROWS, classes, layout=layout)
        found[layout] = write_tensors(folder / layout, table.state_dict()).size / _TABLE_ROWS
    return found


def judge(blocked: Ratio | None, table: Mapping[str, float], resume: float | None) -> list[Verdict]:
    """Compare with the targets. Bytes are the same on every machine; times are None if the run was too short."""
    share = table["slots"] / table["dense"]
    verdicts = [
        Verdict("table in slots <= 1/40 of dense, 1,000 classes", f"1/{1 / share:.1f}", share <= MAX_TABLE_SHARE),
        Verdict(f"training blocked <= {MAX_BLOCKED} x a synchronous save", "", None),
        Verdict(f"first batch after a resume late in an epoch <= {MAX_RESUME} x one at its start", "", None),
    ]
    if blocked is not None:
        undecided = blocked.median_from <= MAX_BLOCKED < blocked.median_to  # another run may decide either way
        verdicts[1] = Verdict(verdicts[1].target, str(blocked), None if undecided else blocked.median <= MAX_BLOCKED)
    if resume is not None:
        verdicts[2] = Verdict(verdicts[2].target, f"{resume:.2f} x", resume <= MAX_RESUME)
    return verdicts


def _save_table(ranks: Sequence[Mapping[str, Any]]) -> str:
    written = sum(rank["bytes"] for rank in ranks)
    rows = []
    for name in (BACKGROUND, SYNCHRONOUS, TORCH):
        turns = [SaveTime(*turn) for rank in ranks for turn in rank["turns"][name]]
        seconds = median(turn.total for turn in turns)
        slowdown = median(turn.step_during / turn.step_before for turn in turns)
        rows.append(
            [
                name,
                f"{median(blocked_seconds(ranks, name)) * 1e3:.0f}",
                f"{seconds * 1e3:.0f}",
                f"{written / seconds / 1e6:.0f}",
                f"{slowdown:.2f} x" if slowdown else "",
            ]
        )
    return format_table(["save", "blocked, ms", "total, ms", "MB/s", "step time during the save"], rows)


def _resume_table(found: Mapping[int, Sequence[float]], full_epoch: float) -> str:
    steps = max(found) + 1
    rows = [
        [f"step {step} of {steps}", f"{median(seconds) * 1e3:.0f}", f"{full_epoch * step / steps * 1e3:.0f}"]
        for step, seconds in found.items()
    ]
    return format_table(["resume at", "first batch, ms", "reading all earlier batches, ms"], rows)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `sopdist bench checkpoint`."""
    parser.add_argument("--quick", action="store_true", help="smoke test of a few seconds on a small network")
    parser.add_argument("--ranks", type=integer(1), default=2, help="processes that save together (default: 2)")
    parser.add_argument("--network", default="preact_resnet18", help="network to save (default: %(default)s)")
    where = "folder for the checkpoints; its disk decides the result (default: a temporary folder)"
    parser.add_argument("--folder", type=Path, help=where)
    add_out(parser, "checkpoint")


def run(args: argparse.Namespace) -> int:
    """Measure, print and write the results file. Returns 0 whether or not the targets are met."""
    environment = start_bench()
    with tempfile.TemporaryDirectory(prefix="sopdist-bench-", dir=args.folder) as name:
        sizes = Sizes(
            name, network="small_conv" if args.quick else args.network, batch=4, classes=CLASSES,
            samples=1000 if args.quick else 400_000, seconds=1.0 if args.quick else 60.0,
            min_rounds=2 if args.quick else 7,
        )  # fmt: skip
        ranks = run_on_ranks(measure, sizes, args.ranks, timeout=_TIMEOUT)
        table = table_bytes(CLASSES, Path(name))
    found, full_epoch = first_batches(*((64, 8, 1) if args.quick else (1536, 16, 7)))
    written = sum(rank["bytes"] for rank in ranks)
    blocked = paired_ratio(blocked_seconds(ranks, BACKGROUND), blocked_seconds(ranks, SYNCHRONOUS))
    resume = median(found[max(found)]) / median(found[0])
    print(f"{args.ranks} ranks ({ranks[0]['device']}), {sizes.network}, {sizes.samples:,} rows of {CLASSES:,} classes:")
    print(f"{format_bytes(written)} per checkpoint, medians of {blocked.rounds} rounds")
    print(_save_table(ranks))
    print(f"\nbytes per row of the table: slots {table['slots']:.1f}, dense {table['dense']:.1f}")
    print(f"\n{_resume_table(found, full_epoch)}")
    results = {
        "ranks": args.ranks,
        "sizes": {key: value for key, value in asdict(sizes).items() if key != "folder"},
        "device": ranks[0]["device"],
        "bytes": written,
        "saves": {name: [rank["turns"][name] for rank in ranks] for name in (BACKGROUND, SYNCHRONOUS, TORCH)},
        "blocked": asdict(blocked),
        "table_bytes_per_row": table,
        "first_batch_seconds": {str(step): seconds for step, seconds in found.items()},
        "full_epoch_seconds": full_epoch,
    }
    verdicts = judge(None if args.quick else blocked, table, None if args.quick else resume)
    finish_bench(args.out, environment, results, verdicts)
    return 0
