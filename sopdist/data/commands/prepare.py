"""Write a data set as shards: plain WebDataset tars with an index, label sets and a manifest, a folder a split.

Images go in byte for byte, unless --resize is given. A run that was interrupted goes on where it stopped when the same
command is given again. `sopdist prepare SOURCE --help` shows how the files of a source must lie.
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

from ..errors import DataError
from ..sources import SOURCES, load_source
from ..sources.order import TRAIN, VAL, Order, hold_out
from ..sources.source import SourceSplit, asked_for
from .arguments import Commands, share, usable_cores, whole

if TYPE_CHECKING:
    from ..prepare.engine import Prepared


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A subcommand a source."""
    sources = cast(Commands, parser.add_subparsers(required=True, dest="source", metavar="SOURCE", action=Commands))
    for name, entry in SOURCES.items():
        sources.add(name, entry.summary, partial(_add_source_arguments, name))


def _add_source_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    source = load_source(name)
    with _needs_extra():
        from ..prepare.job import Options
    parser.description = (source.__doc__ or "").strip()
    needs_root = SOURCES[name].needs_root
    parser.add_argument("--root", type=Path, required=needs_root, help="where the data set is" + _optional(needs_root))
    parser.add_argument("--out", type=Path, required=True, help="each split becomes a folder in this one")
    source.add_arguments(parser)
    common = parser.add_argument_group("how to write it")
    common.add_argument("--splits", help="only these, separated by commas (default: all)")
    common.add_argument(
        "--val", type=_part, metavar="SHARE",
        help="hold out this share of the training images, of each class, as split val; always the same ones",
    )  # fmt: skip
    common.add_argument(
        "--resize", type=whole(1), metavar="SHORT_SIDE", help="shrink images whose short side is longer, as JPEG"
    )
    common.add_argument(
        "--quality", type=whole(1, 100), default=Options.quality, help="of JPEGs that --resize writes (%(default)s)"
    )
    common.add_argument(
        "--samples-per-shard", type=whole(1), default=Options.samples_per_shard, metavar="N",
        help="images a shard (%(default)s)",
    )  # fmt: skip
    common.add_argument(
        "--order", choices=get_args(Order), default=Options.order,
        help="of the images: as the source lists them, or shuffled once; auto shuffles what is sorted by class",
    )  # fmt: skip
    common.add_argument("--workers", type=whole(1), default=usable_cores(), metavar="N", help="threads (%(default)s)")
    common.add_argument(
        "--max-bad", type=share, default=Options.max_bad, metavar="SHARE",
        help="unusable images a split may have (%(default)s)",
    )  # fmt: skip
    common.add_argument(
        "--overwrite", action="store_true", help="delete a split that is there, with all of its label sets"
    )
    common.add_argument(
        "--overwrite-once", type=_name, metavar="NAME",
        help="--overwrite, but go on if a run of this NAME was interrupted after that: for jobs that are started again",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Find the splits, prepare them, say what came out."""
    with _needs_extra():
        from ..prepare.engine import prepare
        from ..prepare.job import Options
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
        how = ", without --overwrite" if args.overwrite else ""
        print(f"\nsopdist: interrupted; to go on, run the same command again{how}", file=sys.stderr)
        return 130
    _print_summary(prepared)
    return 0


def _find_splits(args: argparse.Namespace) -> list[SourceSplit]:
    """Those that are asked for."""
    source = load_source(args.source)
    if args.val is None:
        splits = source.find_splits(args)
    else:
        splits = _with_val(source.find_splits(argparse.Namespace(**{**vars(args), "splits": None})), args.val)
    wanted = asked_for([split.name for split in splits], args.splits)
    return [split for split in splits if split.name in wanted]


def _with_val(splits: list[SourceSplit], share_of_val: float) -> list[SourceSplit]:
    """The same splits, with a part of train as val."""
    names = [split.name for split in splits]
    if VAL in names or TRAIN not in names:
        what = f"the source has a split {VAL} already" if VAL in names else f"the source has no split {TRAIN}"
        raise DataError(f"--val {share_of_val:g}: {what} (it has {', '.join(names)}); leave --val out")
    place = names.index(TRAIN)
    return [*splits[:place], *hold_out(splits[place], share_of_val), *splits[place + 1 :]]


def _print_summary(prepared: Sequence[Prepared]) -> None:
    for split in prepared:
        if split.was_there:
            added = f"; label sets added: {', '.join(split.added)}" if split.added else ""
            print(f"{split.folder}: already prepared{added}")
    print(f"\n{'split':<12}{'samples':>12}{'shards':>8}{'MB':>12}{'classes':>9}{'skipped':>9}")
    for split in prepared:
        manifest = split.manifest
        megabytes = sum(shard.bytes for shard in manifest.shards) / 1e6
        print(
            f"{manifest.split:<12}{manifest.samples:>12,}{len(manifest.shards):>8,}{megabytes:>12,.1f}"
            f"{len(manifest.classes):>9,}{split.skipped:>9,}"
        )
    for split in prepared:
        if split.order == "shuffled":
            print(f"{split.manifest.split}: shuffled, because it is sorted by class; --order source keeps the order")
        if split.skipped:
            print(f"{split.folder / 'skipped.txt'} lists what was skipped")
    print(f"\nnext: sopdist verify {shlex.quote(str(prepared[0].folder))}")


def _optional(needed: bool) -> str:
    return "" if needed else " (optional)"


@contextmanager
def _needs_extra() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise DataError(f"`sopdist prepare` needs {error.name}: pip install 'sopdist[data]'") from None


def _name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,100}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no name: letters, digits, '_', '.' and '-'")
    return text


def _part(text: str) -> float:
    number = share(text)
    if number in (0, 1):
        raise argparse.ArgumentTypeError(f"{text!r} leaves one of the two splits empty; use a number between 0 and 1")
    return number
