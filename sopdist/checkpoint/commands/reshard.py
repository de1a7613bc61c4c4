"""Write the same state as a checkpoint of another number of ranks: each has a file with its rows of the noise table and
its share of the network and the optimizer.

A run goes on at any number of ranks without this: each rank then reads the whole noise table and takes its rows out of
it. Where the table is large (gigabytes) and many ranks will begin from one checkpoint, again and again or from slow
storage, do that once here: each of 512 ranks then finds its rows in one file. For a table of 100 MB it gains nothing.
The result is a checkpoint like any other: put it in place of the original in RUN/checkpoints, or begin another run from
it with --resume DIR.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ...data.commands.arguments import whole
from ...data.commands.output import cannot_write, progress_bar
from ...data.errors import DataError
from ..folder import verify_checkpoint
from .finding import WHICH, find_one
from .resharding import write_for
from .sizes import counted, size_text

_MOST = 100_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `sopdist checkpoint reshard`."""
    parser.add_argument("folder", metavar="CHECKPOINT_OR_RUN", type=Path, help=WHICH)
    parser.add_argument("--ranks", metavar="W", type=whole(1, _MOST), required=True, help="that will read it")
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="folder of the new checkpoint")


def run(args: argparse.Namespace) -> int:
    """Reshard, and verify what was written."""
    folder = find_one(args.folder)
    if args.out.exists():
        raise DataError(f"--out {args.out}: is there already; name a new folder")
    saved = verify_checkpoint(folder)
    with (
        cannot_write(args.out),
        progress_bar(total=args.ranks, unit="rank", leave=False, disable=args.ranks < 16) as bar,
    ):
        write_for(args.out, saved, args.ranks, progress=bar.update)
    size = sum(verify_checkpoint(args.out).files.values())
    ranks = f"{counted(args.ranks, 'rank')} instead of {saved.ranks:,}"
    print(f"{args.out}: step {saved.step:,} for {ranks}, {size_text(size)}, intact")
    return 0
