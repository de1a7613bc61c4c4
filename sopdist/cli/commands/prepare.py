"""Convert a data set to shards: plain WebDataset tars with indices, label sets and a manifest, one folder per split.

Images are copied byte for byte, unless --resize is given. To resume an interrupted run, run the same command again.
`sopdist prepare SOURCE --help` shows the file layout that a source expects.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast, get_args

from ...cores import usable_cores
from ...data.sources import SOURCES, load_source
from ...data.sources.order import TRAIN, VAL, Order, hold_out
from ...data.sources.source import SourceSplit, select_splits
from ...errors import DataError
from ..arguments import Commands, fraction, integer
from ..tables import format_table

if TYPE_CHECKING:
    from ...data.prepare.engine import Prepared


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One subcommand per source."""
    sources = cast(Commands, parser.add_subparsers(required=True, dest="source", metavar="SOURCE", action=Commands))
    for name, entry in SOURCES.items():
        sources.add(name, entry.summary, partial(_add_source_arguments, name))


def _add_source_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    source = load_source(name)
    with _needs_extra():
        from ...data.prepare.job import Options
    parser.description = (source.__doc__ or "").strip()
    needs_root = SOURCES[name].needs_root
    parser.add_argument("--root", type=Path, required=needs_root, help="folder of the data set" + _optional(needs_root))
    parser.add_argument("--out", type=Path, required=True, help="output folder; each split becomes a subfolder")
    source.add_arguments(parser)
    common = parser.add_argument_group("output options")
    common.add_argument("--splits", help="only these splits, comma-separated (default: all)")
    common.add_argument(
        "--val", type=_val_fraction, metavar="FRACTION",
        help="hold out this fraction of each class of the training images as split val; always the same images",
    )  # fmt: skip
    common.add_argument(
        "--resize", type=integer(1), metavar="SHORT_SIDE",
        help="shrink images with a longer short side to this size, as JPEG",
    )  # fmt: skip
    common.add_argument(
        "--quality", type=integer(1, 100), default=Options.quality,
        help="quality of the JPEGs that --resize writes (%(default)s)",
    )  # fmt: skip
    common.add_argument(
        "--samples-per-shard", type=integer(1), default=Options.samples_per_shard, metavar="N",
        help="samples per shard (%(default)s)",
    )  # fmt: skip
    common.add_argument(
        "--order", choices=get_args(Order), default=Options.order,
        help="order of the images: as in the source, or shuffled once; auto shuffles a source that is sorted by class",
    )  # fmt: skip
    common.add_argument(
        "--workers", type=integer(1), default=usable_cores(), metavar="N", help="number of threads (%(default)s)"
    )
    common.add_argument(
        "--max-bad", type=fraction, default=Options.max_bad, metavar="FRACTION",
        help="fraction of unusable images that a split may have (%(default)s)",
    )  # fmt: skip
    common.add_argument("--overwrite", action="store_true", help="delete an existing split, with all of its label sets")
    common.add_argument(
        "--overwrite-once", type=_run_name, metavar="NAME",
        help="like --overwrite, but resume if run NAME has already overwritten the splits: for jobs that are requeued",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Find the splits, prepare them, print a summary."""
    with _needs_extra():
        from ...data.prepare.engine import prepare
        from ...data.prepare.job import Options
    options = Options(
        resize=args.resize,
        quality=args.quality,
        samples_per_shard=args.samples_per_shard,
        workers=args.workers,
        max_bad=args.max_bad,
        order=args.order,
        overwrite=args.overwrite,
        overwrite_once=args.overwrite_once or "",
    )
    try:
        splits = _find_splits(args)
        prepared = prepare(args.source, splits, args.out, options)
    except KeyboardInterrupt:
        without = ", without --overwrite" if args.overwrite else ""
        print(f"\nsopdist: interrupted; to resume, run the same command again{without}", file=sys.stderr)
        return 130
    _print_summary(prepared)
    return 0


def _find_splits(args: argparse.Namespace) -> list[SourceSplit]:
    """The splits selected by --splits, including one held out by --val."""
    source = load_source(args.source)
    if args.val is None:
        splits = source.find_splits(args)
    else:
        splits = _with_val(source.find_splits(argparse.Namespace(**{**vars(args), "splits": None})), args.val)
    wanted = select_splits([split.name for split in splits], args.splits)
    return [split for split in splits if split.name in wanted]


def _with_val(splits: list[SourceSplit], val_fraction: float) -> list[SourceSplit]:
    """The same splits, with a part of train held out as val."""
    names = [split.name for split in splits]
    if VAL in names or TRAIN not in names:
        what = f"the source already has a split {VAL}" if VAL in names else f"the source has no split {TRAIN}"
        raise DataError(f"--val {val_fraction:g}: {what} (it has {', '.join(names)}); leave --val out")
    train = names.index(TRAIN)
    return [*splits[:train], *hold_out(splits[train], val_fraction), *splits[train + 1 :]]


def _print_summary(prepared: Sequence[Prepared]) -> None:
    for split in prepared:
        if split.existed:
            added = f"; label sets added: {', '.join(split.added)}" if split.added else ""
            print(f"{split.folder}: already prepared{added}")
    rows = []
    for split in prepared:
        manifest = split.manifest
        megabytes = sum(shard.bytes for shard in manifest.shards) / 1e6
        counts = (f"{count:,}" for count in (len(manifest.classes), split.skipped))
        rows.append(
            [manifest.split, f"{manifest.samples:,}", f"{len(manifest.shards):,}", f"{megabytes:,.1f}", *counts]
        )
    print("\n" + format_table(["split", "samples", "shards", "MB", "classes", "skipped"], rows))
    for split in prepared:
        if split.order == "shuffled":
            print(f"{split.manifest.split}: shuffled, because it is sorted by class; --order source keeps the order")
        if split.skipped:
            print(f"{split.folder / 'skipped.txt'} lists the skipped images")
    print(f"\nnext: sopdist verify {shlex.quote(str(prepared[0].folder))}")


def _optional(needed: bool) -> str:
    return "" if needed else " (optional)"


@contextmanager
def _needs_extra() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise DataError(f"`sopdist prepare` needs {error.name}: pip install 'sopdist[data]'") from None


def _run_name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,100}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a valid name: use letters, digits, '_', '.' and '-'")
    return text


def _val_fraction(text: str) -> float:
    number = fraction(text)
    if number in (0, 1):
        raise argparse.ArgumentTypeError(f"{text!r} leaves one of the two splits empty; use a number between 0 and 1")
    return number
