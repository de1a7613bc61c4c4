"""The noise table: one row a sample, in one of two layouts behind one interface.

A row holds u, v, and the running mean of the sample's loss and margin over its visits. The layouts differ only in v:

    dense   v (R, K): every class.
    slots   v (R, M), classes (R, M): the M entries that ever moved, -1 for a free slot. All other entries still have
            their initial value, which `counter` recomputes. While no row needs more than M slots this is the dense
            table bit for bit; past that the smallest |v| is evicted, and `evictions` and `evicted` (R,) record how
            often and the largest v^2 that was given up.

A table may hold a slice of all samples: row r is sample `first + r * stride`, so rank 1 of 3 holds samples 1, 4, 7, ...

This file knows where values are kept, not how they change (`kernels/`) nor what they mean for a loss (`sop.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from . import saved
from .counter import fill_initial_v, initial_u

Layout = Literal["dense", "slots"]
DEFAULT_SLOTS = 8

# `auto` prefers dense, which is exact without conditions, up to this size, or wherever slots would not be smaller.
AUTO_DENSE_BYTES = 256 * 2**20

_CHUNK_ENTRIES = 1 << 22  # v entries handled at a time where a whole table is converted or summarised


class RowBlock(NamedTuple):
    """What the loss needs of some rows: u (R,), v (R, K or M) and, for slots, classes (R, M)."""

    u: Tensor
    v: Tensor
    classes: Tensor | None


def class_dtype(num_classes: int) -> torch.dtype:
    """The smallest integer type that holds a class number and -1."""
    return torch.int16 if num_classes <= torch.iinfo(torch.int16).max else torch.int32


def row_bytes(layout: Layout, num_classes: int, slots: int = DEFAULT_SLOTS) -> int:
    """Bytes of one row: u, mean loss, mean margin, visits, and the layout's own columns."""
    shared = 4 * 4
    if layout == "dense":
        return shared + 4 * num_classes
    return shared + slots * (4 + class_dtype(num_classes).itemsize) + 4 + 4


def choose_layout(num_samples: int, num_classes: int, slots: int = DEFAULT_SLOTS) -> Layout:
    """The layout that `auto` stands for: dense while it is small or the smaller one, else slots.

    It depends on the whole data set, not on one rank's slice, so that every world size gets the same table.
    """
    dense, sparse = (row_bytes(layout, num_classes, min(slots, num_classes)) for layout in saved.LAYOUTS)
    return "dense" if dense <= sparse or num_samples * dense <= AUTO_DENSE_BYTES else "slots"


class NoiseTable(nn.Module):
    """Rows of u, v and running means: buffers that follow `.to(device)` and stay float32 whatever the module's type."""

    u: Tensor
    v: Tensor
    classes: Tensor | None
    mean_loss: Tensor
    mean_margin: Tensor
    visits: Tensor
    skipped: Tensor
    evictions: Tensor | None
    evicted: Tensor | None
    meta: Tensor

    def __init__(
        self,
        num_samples: int,
        num_classes: int,
        *,
        layout: Literal["auto", "dense", "slots"] = "auto",
        slots: int = DEFAULT_SLOTS,
        seed: int = 0,
        first: int = 0,
        stride: int = 1,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        _check_integer("num_samples", num_samples, at_least=1)
        _check_integer("num_classes", num_classes, at_least=2)
        _check_integer("slots", slots, at_least=1)
        _check_integer("seed", seed, at_least=0, below=2**63)
        _check_integer("stride", stride, at_least=1)
        _check_integer("first", first, at_least=0, below=stride)
        if layout not in ("auto", *saved.LAYOUTS):
            raise ValueError(f"layout must be 'auto', 'dense' or 'slots', got {layout!r}")
        self.num_samples, self.num_classes, self.seed = num_samples, num_classes, seed
        self.first, self.stride = first, stride
        self.slots = min(slots, num_classes)
        self.layout: Layout = choose_layout(num_samples, num_classes, slots) if layout == "auto" else layout

        rows = len(range(first, num_samples, stride))
        # Types and devices are spelled out: torch's defaults can be changed, and a table in bfloat16 would never learn.
        samples = self.samples_of(torch.arange(rows, device=device))
        device = samples.device
        floats: dict[str, Any] = {"dtype": torch.float32, "device": device}
        self.register_buffer("u", initial_u(seed, samples))
        if self.layout == "dense":
            self.register_buffer("v", fill_initial_v(torch.empty(rows, num_classes, **floats), seed, samples))
            for name in ("classes", "evictions", "evicted"):
                self.register_buffer(name, None)
        else:
            self.register_buffer("v", torch.zeros(rows, self.slots, **floats))
            free = torch.full((rows, self.slots), saved.FREE, dtype=class_dtype(num_classes), device=device)
            self.register_buffer("classes", free)
            self.register_buffer("evictions", torch.zeros(rows, dtype=torch.int32, device=device))
            self.register_buffer("evicted", torch.zeros(rows, **floats))
        self.register_buffer("mean_loss", torch.zeros(rows, **floats))
        self.register_buffer("mean_margin", torch.zeros(rows, **floats))
        self.register_buffer("visits", torch.zeros(rows, dtype=torch.int32, device=device))
        # Samples that were seen but did not count: [weight 0 or out of range, logits not finite].
        self.register_buffer("skipped", torch.zeros(2, dtype=torch.int64, device=device))
        self.register_buffer("meta", saved.describe(self).to(device))

    def __len__(self) -> int:
        return self.u.shape[0]

    def extra_repr(self) -> str:
        """One line for `print(model)`."""
        kept = f", slots={self.slots}" if self.layout == "slots" else ""
        visited = "" if self.u.is_meta else f"{int((self.visits > 0).sum()):,} of "
        size = f"{self.nbytes:,} bytes"
        return f"{visited}{self.num_samples:,} samples visited, {self.num_classes} classes, {self.layout}{kept}, {size}"

    @property
    def nbytes(self) -> int:
        """Bytes that the rows take in memory."""
        return len(self) * row_bytes(self.layout, self.num_classes, self.slots)

    @property
    def block(self) -> RowBlock:
        """All rows, as the loss kernel reads them."""
        return RowBlock(self.u, self.v, self.classes)

    def samples_of(self, rows: Tensor | slice) -> Tensor:
        """Sample numbers of local row numbers."""
        if isinstance(rows, slice):
            rows = torch.arange(*rows.indices(len(self)), device=self.u.device)
        return rows.to(torch.int64) * self.stride + self.first

    def dense_v(self, rows: Tensor) -> Tensor:
        """v of all classes for these rows, (len(rows), K), whatever the layout."""
        if self.classes is None:
            return self.v[rows]
        out = torch.empty(len(rows), self.num_classes, dtype=torch.float32, device=self.v.device)
        return saved.scatter_slots(
            fill_initial_v(out, self.seed, self.samples_of(rows)), self.classes[rows], self.v[rows]
        )

    def strongest(self, labels: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """For each row the largest v^2 and its class, (R,) each, the class in `labels` (R,) left out if given.

        An untouched row of slots answers 0 and class 0.
        """
        if self.classes is None:
            largest = []
            for part in self.parts():
                size = self.v[part].abs()
                largest.append((size if labels is None else size.scatter(1, labels[part, None], 0)).max(dim=1))
            return torch.cat([part.values for part in largest]).square(), torch.cat([part.indices for part in largest])
        size = self.v.abs()  # a free slot holds 0
        if labels is not None:
            size = size.masked_fill(self.classes == labels[:, None], 0)
        best, slot = size.max(dim=1)
        return best.square(), self.classes.gather(1, slot[:, None])[:, 0].clamp_min(0).to(torch.int64)

    def parts(self) -> Iterator[slice]:
        """Slices of the rows, small enough that a dense temporary of one stays small."""
        step = max(1, _CHUNK_ENTRIES // self.num_classes)
        return (slice(start, start + step) for start in range(0, max(len(self), 1), step))

    def _apply(self, fn: Any, recurse: bool = True) -> NoiseTable:
        """Follow the module to another device, but never to another type: 1e-8 underflows in half precision."""
        return super()._apply(keep_type(fn), recurse)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,  # noqa: ARG002 - the signature is torch's
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """torch's way in; `saved` checks everything, then copies or converts."""
        found = {key[len(prefix) :]: value for key, value in state_dict.items() if key.startswith(prefix)}
        foreign = [prefix + name for name in sorted(found.keys() - saved.KEYS)] if strict else []
        unexpected_keys.extend(foreign)
        if "meta" not in found:
            missing_keys.append(prefix + "meta")
        if foreign or "meta" not in found:
            return
        try:
            saved.load(self, found)
        except ValueError as problem:
            error_msgs.append(f"the noise table does not fit: {problem}")


def keep_type(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """What `nn.Module._apply` is to do to a buffer whose type must not change: 1e-8 underflows in half precision."""

    def apply(buffer: Tensor) -> Tensor:
        out = fn(buffer)
        if buffer.is_meta and not out.is_meta:
            raise RuntimeError("make SOP where it is to live (device=...): empty memory does not hold its start")
        return out if out.dtype == buffer.dtype else buffer.to(out.device)

    return apply


def _check_integer(name: str, value: int, *, at_least: int, below: int | None = None) -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or value < at_least
        or (below is not None and value >= below)
    ):
        span = f"at least {at_least}" if below is None else f"in [{at_least}, {below})"
        raise ValueError(f"{name} must be an integer {span}, got {value!r}")
