"""What is in a checkpoint: versions, the run's fingerprint, tensors by kind, and what the noise table has found."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ...data.labelling.diff import align
from ..export.noise_file import SavedTable
from ..index import TensorInfo
from ..saved import Saved, open_checkpoint
from .finding import WHICH, find_one
from .listing import when
from .sizes import counted, size_text

_KINDS = ("network", "optimizer", "statistics", "noise", "tally")
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `sopdist checkpoint show`."""
    parser.add_argument("folder", metavar="CHECKPOINT_OR_RUN", type=Path, help=WHICH)
    parser.add_argument("--tensors", action="store_true", help="name every tensor")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Show it."""
    saved = open_checkpoint(find_one(args.folder))
    about = describe(saved)
    if args.tensors:
        about["tensor_list"] = {name: _tensor(info) for name, info in sorted(saved.tensors.items())}
    print(json.dumps(about, indent=1) if args.json else "\n".join(_lines(about)))
    return 0


def describe(saved: Saved) -> dict[str, Any]:
    """All that is shown. The noise table is read, nothing else is."""
    kinds: dict[str, dict[str, int]] = {}
    for name, info in saved.tensors.items():
        kind = kinds.setdefault(name.partition("/")[0], {"tensors": 0, "numbers": 0, "bytes": 0})
        kind["tensors"] += 1
        kind["numbers"] += info.elements
        kind["bytes"] += info.bytes
    weights = [
        info.elements
        for name, info in saved.tensors.items()
        if name.startswith("network/") and info.dtype.is_floating_point and not name.endswith(_BUFFERS)
    ]
    about: dict[str, Any] = {
        "folder": str(saved.folder),
        "format": saved.format,
        "step": saved.step,
        "epoch": saved.epoch if saved.format > 1 else None,
        "when": when(saved),
        "ranks": saved.ranks,
        "engine": saved.engine or None,
        "best": saved.best if saved.best >= 0 else None,
        "versions": saved.versions,
        "files": saved.files,
        "fingerprint": saved.fingerprint,
        "tensors": {kind: kinds[kind] for kind in (*_KINDS, *sorted(kinds.keys() - set(_KINDS))) if kind in kinds},
        "parameters": sum(weights),
    }
    return about | ({"noise": describe_noise(SavedTable(saved.noise()))} if saved.has_noise else {})


def describe_noise(noise: SavedTable) -> dict[str, Any]:
    """What the table says of itself and, without knowing the labels, of them."""
    visited = int(noise.visited().sum())
    evictions, evicted = noise.evictions()
    return {
        "layout": noise.table.layout,
        "slots": noise.table.slots if noise.table.layout == "slots" else None,
        "samples": noise.num_samples,
        "classes": noise.table.num_classes,
        "visited": visited,
        "active": int(noise.active().sum()),
        "flagged": int(noise.flags().sum()),
        "estimated_rate": noise.noise_rate() if visited else None,
        "evictions": evictions,
        "largest_evicted": evicted,
    }


def _tensor(info: TensorInfo) -> dict[str, Any]:
    dtype = str(info.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": list(info.shape), "bytes": info.bytes, "pieces": len(info.pieces)}


def _lines(about: dict[str, Any]) -> list[str]:
    size, files = size_text(sum(about["files"].values())), counted(len(about["files"]), "file")
    where = [f"step {about['step']:,}"] + ([] if about["epoch"] is None else [f"epoch {about['epoch']:.2f}"])
    by = counted(about["ranks"], "rank") + (f", {about['engine']}" if about["engine"] else "")
    lines = [
        about["folder"],
        f"  {', '.join(where)}, written {about['when']} by {by}; {size} in {files}, format {about['format']}",
        "  best so far: " + ("none" if about["best"] is None else f"{about['best']:.2%}"),
        "  " + ", ".join(f"{name} {version}" for name, version in about["versions"].items()),
        f"  network: {about['parameters']:,} parameters",
        *([_noise_line(about["noise"])] if "noise" in about else []),
        "",
    ]
    rows = [["kind", "tensors", "numbers", "size"]]
    for kind, sums in about["tensors"].items():
        rows.append([kind, f"{sums['tensors']:,}", f"{sums['numbers']:,}", size_text(sums["bytes"])])
    lines += [f"  {line}" for line in align(rows, left=(0,))]
    lines += ["", "  fingerprint", *(f"    {key}: {value}" for key, value in about["fingerprint"].items())]
    if "tensor_list" in about:
        rows = [["tensor", "type", "shape", "bytes"]]
        for name, info in about["tensor_list"].items():
            rows.append([name, info["dtype"], " x ".join(map(str, info["shape"])) or "-", f"{info['bytes']:,}"])
        lines += ["", *(f"  {line}" for line in align(rows, left=(0, 1, 2)))]
    return lines


def _noise_line(noise: dict[str, Any]) -> str:
    layout = noise["layout"] + (f" of {noise['slots']}" if noise["slots"] else "")
    rate = "" if noise["estimated_rate"] is None else f", {noise['estimated_rate']:.2%} of the labels look wrong"
    lost = (
        f", {noise['evictions']:,} evictions (v^2 up to {noise['largest_evicted']:.2g})" if noise["evictions"] else ""
    )
    seen = f"{noise['visited']:,} of {noise['samples']:,} samples visited, {noise['active']:,} active"
    return f"  noise table: {layout}, {noise['classes']:,} classes, {seen}{rate}{lost}"
