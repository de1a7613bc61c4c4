"""Show the contents of a checkpoint: versions, the run's fingerprint, tensors by kind, noise table statistics."""

from __future__ import annotations

import argparse
import json
from datetime import datetime
from typing import Any

from ...checkpoint import names
from ...checkpoint.checkpoint import Checkpoint, open_checkpoint
from ...checkpoint.folder import find_checkpoint
from ...checkpoint.index import TensorInfo
from ...checkpoint.old_format import STATE
from ...export.noise_table import SavedTable
from ..tables import format_table
from ..units import format_bytes, pluralize

_KINDS = ("network", "optimizer", "statistics", "tables", "step_metrics")
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `sopdist checkpoint show`."""
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """`sopdist checkpoint show`."""
    saved = open_checkpoint(find_checkpoint(args.folder))
    about = describe(saved)
    if args.tensors:
        about["tensor_list"] = {name: _tensor(info) for name, info in sorted(saved.tensors.items())}
    print(json.dumps(about, indent=1) if args.json else "\n".join(_lines(about)))
    return 0


def describe(saved: Checkpoint) -> dict[str, Any]:
    """Everything that is shown. Reads the index and the noise table."""
    kinds: dict[str, dict[str, int]] = {}
    for name, info in saved.tensors.items():
        kind = kinds.setdefault(name.partition("/")[0], {"tensors": 0, "numbers": 0, "bytes": 0})
        kind["tensors"] += 1
        kind["numbers"] += info.elements
        kind["bytes"] += info.bytes
    weights = [
        info.elements
        for name, info in saved.tensors.items()
        if name.startswith(names.NETWORK) and info.dtype.is_floating_point and not name.endswith(_BUFFERS)
    ]
    about: dict[str, Any] = {
        "folder": str(saved.folder),
        "format": saved.format,
        "step": saved.step,
        "epoch": saved.epoch if saved.format > 1 else None,
        "when": saved_at(saved),
        "ranks": saved.ranks,
        "engine": saved.engine or None,
        "best": saved.best if saved.best >= 0 else None,
        "versions": saved.versions,
        "files": saved.files,
        "fingerprint": saved.fingerprint,
        "tensors": {kind: kinds[kind] for kind in (*_KINDS, *sorted(kinds.keys() - set(_KINDS))) if kind in kinds},
        "parameters": sum(weights),
    }
    if "noise" not in saved.table_names:
        return about
    return about | {"noise": describe_noise(SavedTable(saved.table("noise"), saved.section(names.METHOD).get("onset")))}


def saved_at(saved: Checkpoint) -> str:
    """When the checkpoint was saved, in local time."""
    time = saved.index.about.get("time")
    if not isinstance(time, int | float):  # format 1
        time = (saved.folder / STATE).stat().st_mtime
    return datetime.fromtimestamp(time).isoformat(" ", "seconds")


def describe_noise(noise: SavedTable) -> dict[str, Any]:
    """Statistics of a noise table, computed without the labels."""
    visited = int(noise.visited().sum())
    evictions, evicted = noise.evictions()
    return {
        "layout": noise.table.layout,
        "slots": noise.table.slots if noise.table.layout == "slots" else None,
        "samples": noise.num_samples,
        "classes": noise.table.num_classes,
        "visited": visited,
        "onset": noise.onset,
        "provisional": noise.provisional,
        "active": int(noise.active().sum()),
        "flagged": int(noise.flags().sum()),
        "estimated_rate": noise.noise_rate() if visited else None,
        "rate_interval": noise.noise_rate_interval() if visited else None,
        "evictions": evictions,
        "largest_evicted": evicted,
    }


def _tensor(info: TensorInfo) -> dict[str, Any]:
    dtype = str(info.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": list(info.shape), "bytes": info.bytes, "fragments": len(info.fragments)}


def _lines(about: dict[str, Any]) -> list[str]:
    size, files = format_bytes(sum(about["files"].values())), pluralize(len(about["files"]), "file")
    progress = [f"step {about['step']:,}"] + ([] if about["epoch"] is None else [f"epoch {about['epoch']:.2f}"])
    writers = pluralize(about["ranks"], "rank") + (f", {about['engine']}" if about["engine"] else "")
    lines = [
        about["folder"],
        f"  {', '.join(progress)}, written {about['when']} by {writers}; {size} in {files}, format {about['format']}",
        "  best so far: " + ("none" if about["best"] is None else f"{about['best']:.2%}"),
        "  " + ", ".join(f"{name} {version}" for name, version in about["versions"].items()),
        f"  network: {about['parameters']:,} parameters",
        *([_noise_line(about["noise"])] if "noise" in about else []),
        "",
    ]
    rows = [
        [kind, f"{sums['tensors']:,}", f"{sums['numbers']:,}", format_bytes(sums["bytes"])]
        for kind, sums in about["tensors"].items()
    ]
    lines += _indented(format_table(["kind", "tensors", "elements", "size"], rows))
    lines += ["", "  fingerprint", *(f"    {key}: {value}" for key, value in about["fingerprint"].items())]
    if "tensor_list" in about:
        rows = [
            [name, info["dtype"], " x ".join(map(str, info["shape"])) or "-", f"{info['bytes']:,}"]
            for name, info in about["tensor_list"].items()
        ]
        lines += ["", *_indented(format_table(["tensor", "dtype", "shape", "bytes"], rows, left=(0, 1, 2)))]
    return lines


def _indented(table: str) -> list[str]:
    return [f"  {line}" for line in table.splitlines()]


def _noise_line(noise: dict[str, Any]) -> str:
    layout = noise["layout"] + (f" ({noise['slots']} per sample)" if noise["slots"] else "")
    rate = ""
    if noise["estimated_rate"] is not None:
        low, high = noise["rate_interval"]
        rate = f", {noise['estimated_rate']:.2%} of the labels look wrong ({low:.1%} to {high:.1%})"
        rate += ", provisional" if noise["provisional"] else ""
    evictions = (
        f", {noise['evictions']:,} evictions (v^2 up to {noise['largest_evicted']:.2g})" if noise["evictions"] else ""
    )
    visited = f"{noise['visited']:,} of {noise['samples']:,} samples visited, {noise['active']:,} active"
    return f"  noise table: {layout}, {noise['classes']:,} classes, {visited}{rate}{evictions}"
