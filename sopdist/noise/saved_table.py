"""Saved noise tables: checks of their columns, and conversion into either layout.

A saved table is a dictionary of plain tensors. One of them, `meta`, describes the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..sample_table.table import META
from .counter import fill_initial_v

if TYPE_CHECKING:
    from .rows import Layout, NoiseTable

FORMAT_VERSION = 3  # formats 1 (without `voting`) and 2 (without `mean_fit`) are read as well
FREE = -1  # class index of a free slot
LAYOUTS: tuple[Layout, ...] = ("dense", "slots")

_META = (*META, "layout", "slots", "voting")
VOTING = _META.index("voting")
_COLUMNS = {
    "u": torch.float32,
    "v": torch.float32,
    "mean_loss": torch.float32,
    "mean_margin": torch.float32,
    "mean_fit": torch.float32,
    "visits": torch.int32,
}
_COUNTS = "skipped"
_SLOT_COLUMNS = {"classes": None, "evictions": torch.int32, "evicted": torch.float32}  # classes: int16 or int32
KEYS = frozenset({"meta", _COUNTS, *_COLUMNS, *_SLOT_COLUMNS})


def load(table: NoiseTable, found: Mapping[str, Tensor]) -> None:
    """Load a saved table of either layout into `table`. ValueError if it does not match; `table` is then unchanged."""
    found = _with_mean_fit(found)
    layout, voting = _check(table, found)
    with torch.no_grad():
        table.voting = voting
        for name in {_COUNTS, *_COLUMNS} - {"v"}:
            getattr(table, name).copy_(found[name])
        v, classes = found["v"].to(table.v.device), found.get("classes") if layout == "slots" else None
        if table.classes is None:
            _read_into_dense(table, v, classes)
        elif classes is not None and v.shape == table.v.shape:
            for name in ("v", *_SLOT_COLUMNS):
                getattr(table, name).copy_(found[name])
        else:
            _read_into_slots(table, v, classes, found)


def _with_mean_fit(found: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Earlier formats have no mean of p_y. That of its logarithm bounds it from below, and comes close."""
    if "mean_fit" in found or "mean_loss" not in found or found["meta"].flatten()[:1].tolist() not in ([1], [2]):
        return found
    return {**found, "mean_fit": (-found["mean_loss"].to(torch.float32)).exp()}


def _check(table: NoiseTable, found: Mapping[str, Tensor]) -> tuple[Layout, bool]:
    """Return the layout of the saved table, and whether it was voting.

    ValueError unless it has the same samples, classes and seed as `table`.
    """
    saved = dict(zip(_META, (int(x) for x in found["meta"].flatten()), strict=False))
    if saved.get("format") == 1:
        saved["voting"] = 0
    elif saved.get("format") not in (2, FORMAT_VERSION):
        wrote = f"it has format {saved.get('format')}, this sopdist reads 1 to {FORMAT_VERSION}"
        raise ValueError(f"{wrote}: load it with the version of sopdist that wrote it")
    if len(saved) != len(_META) or saved["layout"] not in range(len(LAYOUTS)) or saved["voting"] not in (0, 1):
        raise ValueError("its `meta` is damaged")
    here = dict(zip(_META, table.meta.tolist(), strict=True))
    keys = ("num_samples", "num_classes", "seed", "first", "stride")
    differs = [
        f"{key} is {saved[key]} in the saved table and {here[key]} here" for key in keys if saved[key] != here[key]
    ]
    if differs:
        raise ValueError("; ".join(differs))

    layout = LAYOUTS[saved["layout"]]
    width = table.num_classes if layout == "dense" else saved["slots"]
    expected = {_COUNTS: torch.int64} | _COLUMNS | (_SLOT_COLUMNS if layout == "slots" else {})
    shapes = {_COUNTS: (2,), "v": (len(table), width), "classes": (len(table), width)}
    for name, dtype in expected.items():
        shape = shapes.get(name, (len(table),))
        if name not in found:
            raise ValueError(f"'{name}' is missing")
        if tuple(found[name].shape) != shape:
            raise ValueError(f"'{name}' must have shape {shape}, found {tuple(found[name].shape)}")
        if found[name].dtype not in ((torch.int16, torch.int32) if dtype is None else (dtype,)):
            raise ValueError(f"'{name}' has the wrong dtype {found[name].dtype}")
        low, high = _range(found[name])
        if not math.isfinite(low + high):
            raise ValueError(f"'{name}' contains values that are not finite")
        if name in ("visits", "evictions", "evicted", _COUNTS) and low < 0:
            raise ValueError(f"'{name}' contains {low:g}, but must not be negative")
        if name == "classes" and not FREE <= low <= high < table.num_classes:
            raise ValueError(f"'classes' ranges from {low:g} to {high:g}, outside -1 to {table.num_classes - 1}")
    if layout == "slots":
        _check_slots(found["classes"], found["v"])
    return layout, bool(saved["voting"])


def _range(column: Tensor) -> tuple[float, float]:
    if not column.numel():
        return 0, 0
    low, high = torch.aminmax(column)
    return float(low), float(high)


def _check_slots(classes: Tensor, v: Tensor) -> None:
    if bool((v[classes == FREE] != 0).any()):
        raise ValueError("a free slot has a value")
    ordered = classes.sort(dim=1).values
    if bool(((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != FREE)).any()):
        raise ValueError("a row contains a class twice")


def _read_into_dense(table: NoiseTable, v: Tensor, classes: Tensor | None) -> None:
    if classes is None:
        table.v.copy_(v)
        return
    for part in table.parts():
        rows = fill_initial_v(table.v[part], table.seed, table.samples_of(part))
        scatter_slots(rows, classes[part].to(v.device), v[part])


def _read_into_slots(table: NoiseTable, v: Tensor, classes: Tensor | None, found: Mapping[str, Tensor]) -> None:
    """Keep the changed entries with the largest |v|. Entries that do not fit count as evicted."""
    assert table.classes is not None
    assert table.evictions is not None
    assert table.evicted is not None
    if classes is None:
        table.evictions.zero_()
        table.evicted.zero_()
    else:
        table.evictions.copy_(found["evictions"])
        table.evicted.copy_(found["evicted"])
    table.v.zero_()
    table.classes.fill_(FREE)
    for part in table.parts():
        values = v[part]  # (rows, K or M)
        if classes is None:
            initial = fill_initial_v(torch.empty_like(values), table.seed, table.samples_of(part))
            moved = values.view(torch.int32) != initial.view(torch.int32)
            entry_classes = torch.arange(table.num_classes, device=v.device).expand_as(values)
        else:
            entry_classes = classes[part].to(v.device, torch.int64)
            moved = entry_classes != FREE
        size = values.abs().where(moved, -1)
        keep = min(table.slots, size.shape[1])
        best, position = size.topk(min(keep + 1, size.shape[1]), dim=1)
        occupied, position = best[:, :keep] >= 0, position[:, :keep]
        table.v[part, :keep] = values.gather(1, position).where(occupied, 0)
        table.classes[part, :keep] = entry_classes.gather(1, position).where(occupied, FREE).to(table.classes.dtype)
        if size.shape[1] > keep:
            table.evictions[part] += (moved.sum(1) - keep).clamp_min(0).to(torch.int32)
            table.evicted[part] = torch.maximum(table.evicted[part], best[:, keep].clamp_min(0).square())


def scatter_slots(dense: Tensor, classes: Tensor, v: Tensor) -> Tensor:
    """Write the occupied slots of each row into its dense row, in place."""
    row, slot = (classes != FREE).nonzero(as_tuple=True)
    dense[row, classes[row, slot].to(torch.int64)] = v[row, slot]
    return dense
