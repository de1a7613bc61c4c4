"""Check a prepared split, or all splits of a folder, and say exactly what is wrong and where.

For each shard: size and SHA-256, the structure of the tar, its .idx against the tar, the number of samples; for each
sample: an image and a json, a key that no other sample has, an image of the format that its name says, the label of
label set `given`. And the label sets, and files that do not belong there. --decode also decodes every image in full.
It goes on after a problem; the exit code is 1 if there was any.

    sopdist verify data                               # every split in it
    sopdist verify data/train --decode --workers 8
    sopdist verify data/train --quick                 # does not read the tars: seconds instead of minutes
"""

from __future__ import annotations

import argparse
import os
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..checking.verify import find_splits, verify_split
from ..checking.verify_shard import Checks, Findings
from ..errors import DataError
from ..manifest import Manifest
from .arguments import local_folder, whole
from .output import progress_bar, write_json

MOST_SHOWN = 20  # of each kind
_MOST_WORKERS = 8  # by default: a disk is not faster with more


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `sopdist verify`."""
    parser.add_argument("folder", metavar="FOLDER", type=local_folder, help="of a split, or of several splits")
    depth = parser.add_mutually_exclusive_group()
    depth.add_argument("--decode", action="store_true", help="decode every image in full (slow, finds the rest)")
    depth.add_argument(
        "--quick", action="store_true", help="do not read the tars: only sizes, indices, keys and label sets"
    )
    workers = min(os.cpu_count() or 1, _MOST_WORKERS)
    parser.add_argument(
        "--workers", type=whole(1), default=workers, metavar="N", help=f"shards to check at a time ({workers})"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help=f"write all problems; otherwise {MOST_SHOWN} of each kind are shown"
    )


def run(args: argparse.Namespace) -> int:
    """Check each split and print what was found."""
    decode = _decoder() if args.decode else None
    splits = find_splits(args.folder)
    reports: list[dict[str, Any]] = []
    for folder in splits:
        if len(splits) > 1:
            print(f"{folder}:")
        found = _verify(folder, args, decode)
        reports.append({"folder": str(folder), "counts": found.counts, "problems": found.as_json()})
    wrong = [report["folder"] for report in reports if report["counts"]]
    if len(splits) > 1:
        print(f"{len(wrong)} of {len(splits)} splits have problems" + "".join(f"\n  {folder}" for folder in wrong))
    if args.json:
        write_json(args.json, {"ok": not wrong, "splits": reports})
    return 1 if wrong else 0


def _verify(folder: Path, args: argparse.Namespace, decode: Callable[[bytes], object] | None) -> Findings:
    lock = threading.Lock()
    with progress_bar(desc="verifying", unit=" samples", unit_scale=True, leave=False, dynamic_ncols=True) as bar:

        def progress(done: int) -> None:
            with lock:  # samples are counted by several threads
                bar.update(done)

        def begin(manifest: Manifest) -> None:
            bar.reset(total=manifest.samples)

        most = None if args.json else MOST_SHOWN
        checks = Checks(decode, args.quick, args.workers, most, begin, progress)
        manifest, found = verify_split(folder, checks)
    for kind, problems in found.problems.items():
        print(f"{kind}: {found.counts[kind]:,}")
        for problem in problems[:MOST_SHOWN]:
            print(f"  {problem}")
        if found.counts[kind] > MOST_SHOWN:
            print(f"  ... and {found.counts[kind] - MOST_SHOWN:,} more; --json FILE writes all")
    what = f"{_many(manifest.samples, 'sample')} in {_many(len(manifest.shards), 'shard')}" if manifest else "no split"
    verdict = _many(found.total, "problem") if found.total else "all is well"
    depth = " (--quick: the tars were not read)" if args.quick else "" if decode else " (pixels: with --decode)"
    print(f"{what}: {verdict}{depth if manifest else '; nothing else could be checked'}\n")
    return found


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}" + ("" if count == 1 else "s")


def _decoder() -> Callable[[bytes], object]:
    try:
        from ..checking.contact_sheet import decode_upright
    except ImportError as error:
        raise DataError(f"--decode needs Pillow ({error}): pip install 'sopdist[data]'") from None
    warnings.filterwarnings("ignore", module=r"PIL\.")  # they name no file; what matters is raised
    return decode_upright
