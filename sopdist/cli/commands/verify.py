"""Check a prepared split, or all splits in a folder, and report each problem with its file, key and index.

For each shard, it checks the size and SHA-256, the structure of the tar, the .idx against the tar, and the number of
samples. For each sample, it checks that there is an image and a json, that the key is unique, that the image has the
format its extension says, and that its label matches label set `given`. It also checks all label sets and reports stray
files. --decode also decodes every image in full. Checking continues after a problem; the exit code is 1 if any problem
was found.

    sopdist verify data                               # all splits in data/
    sopdist verify data/train --decode --workers 8
    sopdist verify data/train --quick                 # does not read the tars: seconds instead of minutes
"""

from __future__ import annotations

import argparse
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...cores import usable_cores
from ...data.checking.verify import find_splits, verify_split
from ...data.checking.verify_shard import Checks, Findings
from ...data.manifest import Manifest
from ...errors import DataError
from ..arguments import integer, local_folder
from ..output import progress_bar, write_json
from ..units import pluralize

MAX_SHOWN = 20  # problems of each kind
_MAX_DEFAULT_WORKERS = 8  # a disk is not faster with more


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `sopdist verify`."""
    parser.add_argument("folder", metavar="FOLDER", type=local_folder, help="folder of one or several splits")
    depth = parser.add_mutually_exclusive_group()
    depth.add_argument("--decode", action="store_true", help="also decode every image in full (slow)")
    depth.add_argument(
        "--quick", action="store_true", help="do not read the tars, check only sizes, indices, keys and label sets"
    )
    workers = min(usable_cores(), _MAX_DEFAULT_WORKERS)
    parser.add_argument(
        "--workers", type=integer(1), default=workers, metavar="N", help=f"shards checked in parallel ({workers})"
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help=f"write all problems as JSON; at most {MAX_SHOWN} of each kind are printed",
    )


def run(args: argparse.Namespace) -> int:
    """Check each split and print its problems."""
    decode = _decoder() if args.decode else None
    splits = find_splits(args.folder)
    reports: list[dict[str, Any]] = []
    for folder in splits:
        if len(splits) > 1:
            print(f"{folder}:")
        found = _verify(folder, args, decode)
        reports.append({"folder": str(folder), "counts": found.counts, "problems": found.as_json()})
    faulty = [report["folder"] for report in reports if report["counts"]]
    if len(splits) > 1:
        print(f"{len(faulty)} of {len(splits)} splits have problems" + "".join(f"\n  {folder}" for folder in faulty))
    if args.json:
        write_json(args.json, {"ok": not faulty, "splits": reports})
    return 1 if faulty else 0


def _verify(folder: Path, args: argparse.Namespace, decode: Callable[[bytes], object] | None) -> Findings:
    lock = threading.Lock()
    with progress_bar(desc="verifying", unit=" samples", unit_scale=True, leave=False, dynamic_ncols=True) as bar:

        def progress(done: int) -> None:
            with lock:  # called from several threads
                bar.update(done)

        def on_start(manifest: Manifest) -> None:
            bar.reset(total=manifest.samples)

        max_kept = None if args.json else MAX_SHOWN
        checks = Checks(decode, args.quick, args.workers, max_kept, on_start, progress)
        manifest, found = verify_split(folder, checks)
    for kind, problems in found.problems.items():
        print(f"{kind}: {found.counts[kind]:,}")
        for problem in problems[:MAX_SHOWN]:
            print(f"  {problem}")
        if found.counts[kind] > MAX_SHOWN:
            print(f"  ... and {found.counts[kind] - MAX_SHOWN:,} more; --json FILE writes all")
    what = "no split"
    if manifest:
        what = f"{pluralize(manifest.samples, 'sample')} in {pluralize(len(manifest.shards), 'shard')}"
    verdict = pluralize(found.total, "problem") if found.total else "no problems found"
    depth = " (--quick: the tars were not read)" if args.quick else "" if decode else " (pixels not checked: --decode)"
    print(f"{what}: {verdict}{depth if manifest else '; nothing else could be checked'}\n")
    return found


def _decoder() -> Callable[[bytes], object]:
    try:
        from ...data.checking.contact_sheet import decode_upright
    except ImportError as error:
        raise DataError(f"--decode needs Pillow ({error}): pip install 'sopdist[data]'") from None
    warnings.filterwarnings("ignore", module=r"PIL\.")  # they do not name the file; real errors are raised
    return decode_upright
