"""Name the checkpoints of a run, the newest last. Reads their indices only: `sopdist checkpoint verify` reads all."""

from __future__ import annotations

import argparse
import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

from ...data.errors import DataError
from ...data.labelling.diff import align
from ..folder import DAMAGED, FOLDER, LATER, check_listing, is_complete
from ..old_format import STATE
from ..saved import Saved, open_checkpoint
from .sizes import size_text

_NAME = re.compile(r"step-(\d+)(\..+)?")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `sopdist checkpoint list`."""
    parser.add_argument("folder", metavar="RUN", type=Path, help="folder of a run")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """List them."""
    entries = list_checkpoints(args.folder)
    if args.json:
        print(json.dumps(entries, indent=1))
    elif not entries:
        print(f"{args.folder}: has no checkpoints")
    else:
        print("\n".join(_table(entries)))
    return 0


def list_checkpoints(run: Path) -> list[dict[str, Any]]:
    """What is known of each; `state`: complete, incomplete, damaged, or later (put aside when the run went back)."""
    if not run.is_dir():
        raise DataError(f"{run}: no such folder")
    if not (run / FOLDER).is_dir():
        if not (run / "config.yaml").is_file():
            raise DataError(f"{run}: is not a run: it has neither {FOLDER}/ nor config.yaml")
        return []
    named = [(path, _NAME.fullmatch(path.name)) for path in (run / FOLDER).iterdir() if path.is_dir()]
    found = sorted((int(match[1]), path) for path, match in named if match is not None)
    return [_entry(step, path) for step, path in found]


def when(saved: Saved) -> str:
    """When it was saved, in local time."""
    time = saved.index.about.get("time")
    if not isinstance(time, int | float):  # format 1
        time = (saved.folder / STATE).stat().st_mtime
    return datetime.fromtimestamp(time).isoformat(" ", "seconds")


def _entry(step: int, folder: Path) -> dict[str, Any]:
    entry: dict[str, Any] = {"folder": str(folder), "step": step}
    if folder.suffix == DAMAGED:
        return entry | {"state": "damaged", "reason": "was found to be damaged, and set aside"}
    if folder.suffix == LATER:
        return entry | {"state": "later", "reason": "was put aside when the run went back to an earlier step"}
    if folder.suffix or not is_complete(folder):
        return entry | {"state": "incomplete", "reason": "its save was interrupted, or is under way"}
    try:
        saved = open_checkpoint(folder)
        check_listing(saved)
    except DataError as error:
        return entry | {"state": "damaged", "reason": str(error)}
    return entry | {
        "state": "complete",
        "step": saved.step,
        "epoch": saved.epoch if saved.format > 1 else None,
        "when": when(saved),
        "bytes": sum(saved.files.values()),
        "ranks": saved.ranks,
        "engine": saved.engine or None,
        "best": saved.best if saved.best >= 0 else None,
        "format": saved.format,
    }


def _table(entries: list[dict[str, Any]]) -> list[str]:
    rows = [["step", "epoch", "when", "size", "ranks", "engine", "best", "format", ""]]
    for entry in entries:
        if entry["state"] != "complete":
            told = f"{entry['state'].upper()}: {entry['reason']}"
            rows.append([f"{entry['step']:,}", *[""] * 7, told])
            continue
        best = "-" if entry["best"] is None else f"{entry['best']:.2%}"
        epoch = "-" if entry["epoch"] is None else f"{entry['epoch']:.2f}"
        shown = [f"{entry['step']:,}", epoch, entry["when"], size_text(entry["bytes"]), str(entry["ranks"])]
        rows.append([*shown, entry["engine"] or "-", best, str(entry["format"]), ""])
    return [line.rstrip() for line in align(rows, left=(2, 5, 8))]
