"""What a split holds, in words and bars: classes, sizes and formats of its images. Knows headers, not pixels."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..headers import ImageHeader, read_header
from ..labelling.diff import align, class_title
from ..labels import UNKNOWN, Labels
from ..manifest import Manifest
from ..split import Split
from .verify_shard import shown

MOST_BARS = 30  # classes; of more, only the largest and the smallest are shown
_ENDS = 10  # that many of each
_BAR = 40
_MOST_BROKEN = 5
_READERS = 8  # threads: on a network file system most of the time is waiting

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Look:
    """One image that was looked at."""

    index: int
    bytes: int
    header: ImageHeader | None
    reason: str  # why there is no header


def manifest_text(manifest: Manifest, label_sets: Sequence[str]) -> str:
    """What it is and how large."""
    size = sum(shard.bytes for shard in manifest.shards)
    rows = [
        ["dataset", f"{manifest.dataset}, split {manifest.split}"],
        ["samples", f"{manifest.samples:,}, {bytes_text(size)} in {len(manifest.shards):,} tars"],
        ["classes", f"{len(manifest.classes):,}"],
        ["label sets", ", ".join(label_sets) or "none"],
        ["digest", manifest.digest],
    ]
    return "\n".join(align(rows, left=(0, 1)))


def histogram_text(labels: Labels, classes: Sequence[str], name: str) -> str:
    """Samples of each class of a label set, as bars; for many classes, the largest and the smallest."""
    known = labels[labels != UNKNOWN]
    counts = np.bincount(known, minlength=len(classes))
    unknown = f", {len(labels) - len(known):,} unknown" if len(known) < len(labels) else ""
    middle = f"median {np.median(counts):,.0f}"
    lines = [f"label set {name}: {counts.min():,} to {counts.max():,} samples a class, {middle}{unknown}"]
    if len(classes) <= MOST_BARS:
        return "\n".join([*lines, *_bars(counts, np.arange(len(classes)), classes)])
    order = np.argsort(-counts, kind="stable")
    bars = _bars(counts, np.concatenate((order[:_ENDS], order[-_ENDS:])), classes)
    between = f"  ... {len(classes) - 2 * _ENDS:,} classes between ..."
    return "\n".join([*lines, *bars[:_ENDS], between, *bars[_ENDS:]])


def look_at(split: Split, indices: Indices) -> Iterator[Look]:
    """Read the headers of these samples' images, several at a time."""

    def look(index: int) -> Look:
        size = 0
        try:
            content = split.image(index)
            size = len(content)
            return Look(index, size, read_header(content), "")
        except (DataError, OSError) as reason:
            return Look(index, size, None, str(reason))

    with ThreadPoolExecutor(_READERS) as pool:
        yield from pool.map(look, indices.tolist())


def images_text(looks: Sequence[Look], of: int, where: Callable[[int], str]) -> str:
    """Formats, sizes and peculiarities of the images that were looked at, out of `of`."""
    headers = [look.header for look in looks if look.header is not None]
    broken = [look for look in looks if look.header is None]
    lines = [f"images: {len(looks):,} of {of:,} looked at"]
    if headers:
        formats = Counter(header.format for header in headers).most_common()
        rows = [["", "smallest", "median", "largest"]]
        for name, values in (
            ("width", [header.width for header in headers]),
            ("height", [header.height for header in headers]),
            ("bytes", [look.bytes for look in looks if look.header is not None]),
        ):
            rows.append([f"  {name}", f"{min(values):,}", f"{statistics.median(values):,.0f}", f"{max(values):,}"])
        turned = sum(header.orientation != 1 for header in headers) / len(headers)
        special = sum(not header.plain for header in headers) / len(headers)
        lines += [
            *align(rows),
            "  formats: " + ", ".join(f"{name} {count / len(headers):.1%}" for name, count in formats),
            f"  turned by their EXIF data: {turned:.1%} (sizes are upright)",
            f"  not plain (CMYK, palette, transparent, 16 bits, animated): {special:.1%}",
        ]
    if broken:
        lines.append(f"  broken: {len(broken):,}, see `sopdist verify`")
        lines += [f"    {where(look.index)}: {look.reason}" for look in broken[:_MOST_BROKEN]]
    return "\n".join(lines)


def samples_text(split: Split, labels: Labels, indices: Indices) -> str:
    """Index, label, key and path of these samples, a line each."""
    rows = [["index", "label", "key", "path"]]
    for index in indices.tolist():
        key = path = "-"
        try:
            shard, place = split.place_of(index)
            key = shown(shard.index.keys[place])
            path = shown(str(shard.record(place).get("path", "-")))
        except (DataError, OSError, ValueError, RecursionError) as reason:
            path = f"BROKEN: {reason}"
        rows.append([str(index), label_title(int(labels[index]), split.manifest.classes), key, path])
    return "\n".join(align(rows, left=(1, 2, 3)))


def label_title(label: int, classes: Sequence[str], width: int = 24) -> str:
    """`3 cat`, or `unknown`."""
    return "unknown" if label == UNKNOWN else class_title(label, classes, width)


def choose(candidates: Indices, count: int, seed: int) -> Indices:
    """At most `count` of them, at random, ascending. For looking only: unlike noise, it is not frozen for good."""
    if len(candidates) <= count:
        return candidates
    return np.sort(np.random.default_rng(seed).choice(candidates, count, replace=False))


def bytes_text(count: int) -> str:
    """1234567 -> `1.2 MB`."""
    size = float(count)
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:,.1f} {unit}" if unit != "bytes" else f"{count} bytes"
        size /= 1000
    return f"{size:,.1f} TB"


def _bars(counts: NDArray[np.int64], which: Indices, classes: Sequence[str]) -> list[str]:
    longest, total = max(1, int(counts.max())), max(1, int(counts.sum()))
    rows = []
    for k in which.tolist():
        count = int(counts[k])
        bar = "#" * (max(1, round(_BAR * count / longest)) if count else 0)
        rows.append(["  " + class_title(k, classes), f"{count:,}", f"{count / total:.1%}", bar])
    return align(rows, left=(0, 3))
