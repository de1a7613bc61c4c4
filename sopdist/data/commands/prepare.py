"""Write a data set as shards: plain WebDataset tars with an index, label sets and a manifest, a folder a split.

Images go in byte for byte, unless --resize is given. A run that was interrupted goes on where it stopped when the same
command is given again. `sopdist prepare SOURCE --help` shows how the files of a source must lie.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import DataError
from ..sources import SOURCES, load_source
from ..sources.source import SourceSplit

if TYPE_CHECKING:
    from ..prepare.engine import Prepared


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A subcommand a source."""
    sources = parser.add_subparsers(required=True, dest="source", metavar="SOURCE", action=_LoadOnDemand)
    for name, entry in SOURCES.items():
        sources.add_parser(name, help=entry.summary, formatter_class=argparse.RawDescriptionHelpFormatter)


class _LoadOnDemand(argparse._SubParsersAction):
    """Loads the one source that is asked for, so that no other command waits for them, or fails with them."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        name = values[0]
        if name in SOURCES:
            _add_source_arguments(self.choices[name], name)
        super().__call__(parser, namespace, values, option_string)


def _add_source_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    source = load_source(name)
    parser.description = (source.__doc__ or "").strip()
    needs_root = SOURCES[name].needs_root
    parser.add_argument("--root", type=Path, required=needs_root, help="where the data set is" + _optional(needs_root))
    parser.add_argument("--out", type=Path, required=True, help="each split becomes a folder in this one")
    source.add_arguments(parser)
    common = parser.add_argument_group("how to write it")
    common.add_argument("--splits", help="only these, separated by commas (default: all)")
    common.add_argument(
        "--resize", type=_whole(1), metavar="SHORT_SIDE", help="shrink images whose short side is longer, as JPEG"
    )
    common.add_argument("--quality", type=_whole(1, 100), default=95, help="of JPEGs that --resize writes (95)")
    common.add_argument("--samples-per-shard", type=_whole(1), default=1000, metavar="N", help="images a shard (1000)")
    common.add_argument(
        "--order", choices=("auto", "source", "shuffled"), default="auto",
        help="of the images: as the source lists them, or shuffled once; auto shuffles what is sorted by class",
    )  # fmt: skip
    common.add_argument("--workers", type=_whole(1), default=_cores(), metavar="N", help="threads (%(default)s)")
    common.add_argument(
        "--max-bad", type=_share, default=0.01, metavar="SHARE", help="unusable images a split may have (0.01)"
    )
    common.add_argument(
        "--overwrite", action="store_true", help="delete a split that is there, with all of its label sets"
    )


def run(args: argparse.Namespace) -> int:
    """Find the splits, prepare them, say what came out."""
    try:
        from ..prepare.engine import prepare
        from ..prepare.job import Options
    except ModuleNotFoundError as error:
        raise DataError(f"`sopdist prepare` needs {error.name}: pip install 'sopdist[data]'") from None
    options = Options(
        resize=args.resize,
        quality=args.quality,
        samples_per_shard=args.samples_per_shard,
        workers=args.workers,
        max_bad=args.max_bad,
        order=args.order,
        overwrite=args.overwrite,
    )
    try:
        splits = _chosen(load_source(args.source).find_splits(args), args.splits)
        prepared = prepare(args.source, splits, args.out, options)
    except KeyboardInterrupt:
        how = ", without --overwrite" if args.overwrite else ""
        print(f"\nsopdist: interrupted; to go on, run the same command again{how}", file=sys.stderr)
        return 130
    _print_summary(prepared)
    return 0


def _chosen(splits: list[SourceSplit], names: str | None) -> list[SourceSplit]:
    if names is None:
        return splits
    wanted = [name.strip() for name in names.split(",")]
    known = [split.name for split in splits]
    for name in wanted:
        if name not in known:
            raise DataError(f"--splits {names}: no split {name!r}; there is {', '.join(known)}")
    return [split for split in splits if split.name in wanted]


def _print_summary(prepared: Sequence[Prepared]) -> None:
    for split in prepared:
        if split.was_there:
            print(f"{split.folder}: already prepared")
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


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _whole(least: int, most: int | None = None) -> Any:
    def parse(text: str) -> int:
        allowed = f"{least} or more" if most is None else f"{least} to {most}"
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number; allowed: {allowed}") from None
        if number < least or (most is not None and number > most):
            raise argparse.ArgumentTypeError(f"{number}; allowed: {allowed}")
        return number

    return parse


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: a number from 0 to 1")
    return share
