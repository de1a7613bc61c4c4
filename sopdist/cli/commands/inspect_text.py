"""Text output of `sopdist inspect`: the manifest, class counts as bars, image sizes and formats, single samples."""

from __future__ import annotations

import statistics
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ...data.checking.inspection import HeaderResult, Indices
from ...data.checking.verify_shard import printable
from ...data.labels import UNKNOWN, Labels
from ...data.manifest import Manifest
from ...data.split import Split
from ...errors import DataError
from ..tables import align, format_table
from ..units import format_bytes
from .labels_text import class_title, label_title

MAX_BARS = 30  # with more classes, only the largest and the smallest are shown
_SHOWN_ENDS = 10  # classes shown at each end
_BAR_WIDTH = 40
_MAX_BROKEN = 5


def manifest_text(manifest: Manifest, label_sets: Sequence[str]) -> str:
    """Name, size, classes and label sets of a split."""
    size = sum(shard.bytes for shard in manifest.shards)
    rows = [
        ["dataset", f"{manifest.dataset}, split {manifest.split}"],
        ["samples", f"{manifest.samples:,}, {format_bytes(size)} in {len(manifest.shards):,} tars"],
        ["classes", f"{len(manifest.classes):,}"],
        ["label sets", ", ".join(label_sets) or "none"],
        ["digest", manifest.digest],
    ]
    return format_table(None, rows, left=(0, 1))


def histogram_text(labels: Labels, classes: Sequence[str], name: str) -> str:
    """Samples per class of a label set, as bars; with many classes, only the largest and the smallest."""
    known = labels[labels != UNKNOWN]
    counts = np.bincount(known, minlength=len(classes))
    unknown = f", {len(labels) - len(known):,} unknown" if len(known) < len(labels) else ""
    middle = f"median {np.median(counts):,.0f}"
    lines = [f"label set {name}: {counts.min():,} to {counts.max():,} samples per class, {middle}{unknown}"]
    if len(classes) <= MAX_BARS:
        return "\n".join([*lines, *_bars(counts, np.arange(len(classes)), classes)])
    order = np.argsort(-counts, kind="stable")
    bars = _bars(counts, np.concatenate((order[:_SHOWN_ENDS], order[-_SHOWN_ENDS:])), classes)
    between = f"  ... {len(classes) - 2 * _SHOWN_ENDS:,} more classes ..."
    return "\n".join([*lines, *bars[:_SHOWN_ENDS], between, *bars[_SHOWN_ENDS:]])


def images_text(results: Sequence[HeaderResult], of: int, where: Callable[[int], str]) -> str:
    """Formats, sizes and peculiarities of the images whose headers were read, out of `of` images."""
    headers = [result.header for result in results if result.header is not None]
    broken = [result for result in results if result.header is None]
    lines = [f"images: headers of {len(results):,} of {of:,}"]
    if headers:
        formats = Counter(header.format for header in headers).most_common()
        rows = []
        for name, values in (
            ("width", [header.width for header in headers]),
            ("height", [header.height for header in headers]),
            ("bytes", [result.bytes for result in results if result.header is not None]),
        ):
            rows.append([name, f"{min(values):,}", f"{statistics.median(values):,.0f}", f"{max(values):,}"])
        rotated = sum(header.orientation != 1 for header in headers) / len(headers)
        special = sum(not header.plain for header in headers) / len(headers)
        lines += [
            textwrap.indent(format_table(["", "smallest", "median", "largest"], rows), "  "),
            "  formats: " + ", ".join(f"{name} {count / len(headers):.1%}" for name, count in formats),
            f"  rotated or mirrored by EXIF: {rotated:.1%} (sizes are upright)",
            f"  not plain (CMYK, palette, transparent, 16 bits, animated): {special:.1%}",
        ]
    if broken:
        lines.append(f"  broken: {len(broken):,}, see `sopdist verify`")
        lines += [f"    {where(result.index)}: {result.reason}" for result in broken[:_MAX_BROKEN]]
    return "\n".join(lines)


def samples_text(split: Split, labels: Labels, indices: Indices) -> str:
    """Index, label, key and path of these samples, one row each."""
    rows = []
    for index in indices.tolist():
        key = path = "-"
        try:
            shard, position = split.locate(index)
            key = printable(shard.index.keys[position])
            path = printable(str(shard.record(position).get("path", "-")))
        except (DataError, OSError, ValueError, RecursionError) as reason:
            path = f"BROKEN: {reason}"
        rows.append([str(index), label_title(int(labels[index]), split.manifest.classes), key, path])
    return format_table(["index", "label", "key", "path"], rows, left=(1, 2, 3))


def _bars(counts: NDArray[np.int64], which: Indices, classes: Sequence[str]) -> list[str]:
    longest, total = max(1, int(counts.max())), max(1, int(counts.sum()))
    rows = []
    for k in which.tolist():
        count = int(counts[k])
        bar = "#" * (max(1, round(_BAR_WIDTH * count / longest)) if count else 0)
        rows.append(["  " + class_title(k, classes), f"{count:,}", f"{count / total:.1%}", bar])
    return align(rows, left=(0, 3))
