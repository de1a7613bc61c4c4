"""Work with the checkpoints of a run: list, inspect, verify, export and reshard them.

    sopdist checkpoint list    runs/cifar10
    sopdist checkpoint show    runs/cifar10                               the newest checkpoint
    sopdist checkpoint verify  runs/cifar10                               all checkpoints
    sopdist checkpoint export  runs/cifar10 --out exported --what network,onnx,noise
    sopdist checkpoint reshard runs/cifar10/checkpoints/step-00004224 --ranks 512 --out resharded

exit codes: 0 done, 1 data or files (verify: a checkpoint is damaged), 2 config or options, 130 interrupted
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...checkpoint.checkpoint import open_checkpoint
from ...checkpoint.folder import (
    DAMAGED,
    FOLDER,
    LATER,
    check_listing,
    find_checkpoint,
    find_checkpoints,
    is_complete,
    verify_checkpoint,
)
from ...checkpoint.resharding import write_for
from ...errors import DataError
from ..arguments import integer
from ..output import cannot_write, progress_bar
from ..tables import format_table
from ..units import format_bytes, pluralize
from . import checkpoint_export, checkpoint_show
from .checkpoint_show import saved_at

LIST = """\
List the checkpoints of a run, newest last. This reads only their indices; `sopdist checkpoint verify` reads
everything."""
VERIFY = """\
Read all files of a checkpoint, or of all complete checkpoints of a run, and compare them with their checksums.

exit codes: 0 all intact, 1 a checkpoint is damaged; the message names the file"""
RESHARD = """\
Rewrite a checkpoint for a different number of ranks; the state stays the same. Each rank gets one file, with its rows
of the sample tables and its share of the network and the optimizer state.

A run can resume on any number of ranks without this: each rank then reads the full tables and keeps its own rows.
Reshard if the tables are large (gigabytes) and many ranks will start from one checkpoint, repeatedly or from slow
storage: each of 512 ranks then finds its rows in one file. For a table of 100 MB it gains nothing.
The result is a regular checkpoint: put it in place of the original in RUN/checkpoints, or start another run from it
with --resume DIR."""
EITHER = "folder of a checkpoint or of a run (its newest checkpoint)"

_MAX_RANKS = 100_000
_PROGRESS_BYTES = 1 << 30  # show a progress bar from this size on
_NAME = re.compile(r"step-(\d+)(\..+)?")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `sopdist checkpoint`."""
    commands = parser.add_subparsers(required=True, metavar="SUBCOMMAND")
    list_ = _subcommand(commands, "list", "list the checkpoints of a run, newest last", LIST, run_list)
    list_.add_argument("folder", metavar="RUN", type=Path, help="folder of a run")
    list_.add_argument("--json", action="store_true", help="print JSON")
    for name, summary, module in (
        ("show", "show the contents of a checkpoint", checkpoint_show),
        ("export", "export the network (timm, sopdist.models, ONNX) or the noise table (Parquet)", checkpoint_export),
    ):
        other = _subcommand(commands, name, summary, (module.__doc__ or "").strip(), module.run)
        other.add_argument("folder", metavar="CHECKPOINT_OR_RUN", type=Path, help=EITHER)
        module.add_arguments(other)
    verify = _subcommand(commands, "verify", "read all files and compare their checksums", VERIFY, run_verify)
    either = "folder of a checkpoint or of a run (all of its complete checkpoints)"
    verify.add_argument("folder", metavar="CHECKPOINT_OR_RUN", type=Path, help=either)
    summary = "rewrite a checkpoint for a different number of ranks"
    reshard = _subcommand(commands, "reshard", summary, RESHARD, run_reshard)
    reshard.add_argument("folder", metavar="CHECKPOINT_OR_RUN", type=Path, help=EITHER)
    about = "number of ranks that will read it"
    reshard.add_argument("--ranks", metavar="W", type=integer(1, _MAX_RANKS), required=True, help=about)
    reshard.add_argument("--out", metavar="DIR", type=Path, required=True, help="folder for the new checkpoint")


def run(args: argparse.Namespace) -> int:
    """Run the subcommand; returns the exit code."""
    subcommand: Callable[[argparse.Namespace], int] = args.subcommand
    return subcommand(args)


def run_list(args: argparse.Namespace) -> int:
    """`sopdist checkpoint list`."""
    entries = list_checkpoints(args.folder)
    if args.json:
        print(json.dumps(entries, indent=1))
    elif not entries:
        print(f"{args.folder}: has no checkpoints")
    else:
        print(_list_text(entries))
    return 0


def list_checkpoints(run: Path) -> list[dict[str, Any]]:
    """Describe all checkpoints of a run. `state` is complete, incomplete, damaged, or later (the run went back)."""
    if not run.is_dir():
        raise DataError(f"{run}: no such folder")
    if not (run / FOLDER).is_dir():
        if not (run / "config.yaml").is_file():
            raise DataError(f"{run}: is not a run: it has neither {FOLDER}/ nor config.yaml")
        return []
    named = [(path, _NAME.fullmatch(path.name)) for path in (run / FOLDER).iterdir() if path.is_dir()]
    found = sorted((int(match[1]), path) for path, match in named if match is not None)
    return [_entry(step, path) for step, path in found]


def run_verify(args: argparse.Namespace) -> int:
    """`sopdist checkpoint verify`; returns 1 if a checkpoint is damaged."""
    folders = find_checkpoints(args.folder)
    total = sum(_indexed_bytes(folder) for folder in folders)
    damaged = 0
    with progress_bar(total=total, unit="B", unit_scale=True, disable=total < _PROGRESS_BYTES, leave=False) as bar:

        def advance(count: int) -> None:
            bar.update(count)

        for folder in folders:
            try:
                saved = verify_checkpoint(folder, progress=advance)
            except (DataError, OSError) as error:
                if not folder.exists():
                    continue  # a run that is still training has removed it: it keeps only the newest
                message = str(error) if isinstance(error, DataError) else f"{error.filename}: {error.strerror}"
                bar.write(f"DAMAGED {message}")
                damaged += 1
                continue
            size = f"{format_bytes(sum(saved.files.values()))} in {pluralize(len(saved.files), 'file')}"
            result = "intact" if saved.format > 1 else "can be opened, but format 1 has no checksums to compare"
            bar.write(f"{folder}: {result}, {size}")
    return 1 if damaged else 0


def run_reshard(args: argparse.Namespace) -> int:
    """`sopdist checkpoint reshard`; verifies the new checkpoint."""
    folder = find_checkpoint(args.folder)
    if args.out.exists():
        raise DataError(f"--out {args.out}: already exists; name a new folder")
    saved = verify_checkpoint(folder)
    with (
        cannot_write(args.out),
        progress_bar(total=args.ranks, unit="rank", leave=False, disable=args.ranks < 16) as bar,
    ):
        write_for(args.out, saved, args.ranks, progress=bar.update)
    size = sum(verify_checkpoint(args.out).files.values())
    ranks = f"{pluralize(args.ranks, 'rank')} instead of {saved.ranks:,}"
    print(f"{args.out}: step {saved.step:,} for {ranks}, {format_bytes(size)}, intact")
    return 0


def _subcommand(
    commands: Any, name: str, summary: str, description: str, action: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.set_defaults(subcommand=action)
    return parser


def _entry(step: int, folder: Path) -> dict[str, Any]:
    entry: dict[str, Any] = {"folder": str(folder), "step": step}
    if folder.suffix == DAMAGED:
        return entry | {"state": "damaged", "reason": "it was found to be damaged and was set aside"}
    if folder.suffix == LATER:
        return entry | {"state": "later", "reason": "it was set aside when the run went back to an earlier step"}
    if folder.suffix or not is_complete(folder):
        return entry | {"state": "incomplete", "reason": "its save was interrupted or is in progress"}
    try:
        saved = open_checkpoint(folder)
        check_listing(saved)
    except DataError as error:
        return entry | {"state": "damaged", "reason": str(error)}
    return entry | {
        "state": "complete",
        "step": saved.step,
        "epoch": saved.epoch if saved.format > 1 else None,
        "when": saved_at(saved),
        "bytes": sum(saved.files.values()),
        "ranks": saved.ranks,
        "engine": saved.engine or None,
        "best": saved.best if saved.best >= 0 else None,
        "format": saved.format,
    }


def _list_text(entries: list[dict[str, Any]]) -> str:
    """A table of the complete checkpoints, then one line for each of the others."""
    rows, others = [], []
    for entry in entries:
        if entry["state"] != "complete":
            others.append(f"step {entry['step']:,} is {entry['state'].upper()}: {entry['reason']}")
            continue
        best = "-" if entry["best"] is None else f"{entry['best']:.2%}"
        epoch = "-" if entry["epoch"] is None else f"{entry['epoch']:.2f}"
        shown = [f"{entry['step']:,}", epoch, entry["when"], format_bytes(entry["bytes"]), str(entry["ranks"])]
        rows.append([*shown, entry["engine"] or "-", best, str(entry["format"])])
    header = ["step", "epoch", "when", "size", "ranks", "engine", "best", "format"]
    table = [format_table(header, rows, left=(2, 5))] if rows else []
    return "\n".join([*table, *([""] if table and others else []), *others])


def _indexed_bytes(folder: Path) -> int:
    """Size of a checkpoint according to its index; 0 if that cannot be read, which verifying reports later."""
    try:
        return sum(open_checkpoint(folder).files.values())
    except (DataError, OSError):
        return 0
