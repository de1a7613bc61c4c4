"""The noise table: one row per sample, in one of two layouts with the same interface.

A row holds u, v, and the running means over its visits of the loss, of the margin and of the fit p_y. The layouts
differ only in v:

    dense   v (R, K): every class.
    slots   v (R, M), classes (R, M): up to M entries that have changed, -1 for a free slot. All other entries still
            have their initial value, which `counter` recomputes. While no row needs more than M slots, this equals the
            dense table bit for bit. After that, the entry with the smallest |v| is evicted; `evictions` (R,) counts
            evictions, and `evicted` (R,) is the largest evicted v^2.

Until the onset of memorisation the table is `voting`: v_k and u then hold votes for class k and for the label. `act`
turns the votes into the noise terms to start from.

This file stores values. It does not know how they change (`kernels/`) or what they mean for a loss (`sop.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..sample_table.table import SampleTable, check_integer
from . import saved_table
from .counter import fill_initial_v, initial_u
from .evidence import count

Layout = Literal["dense", "slots"]
DEFAULT_SLOTS = 8

# `auto` chooses dense, which is always exact, up to this size, or if slots would not be smaller.
AUTO_DENSE_BYTES = 256 * 2**20

ACTIVE = 0.01  # a square of u or v below this has no effect
_SMALLEST_VOTE = 1e-6  # more than any initial value
START = 0.9909705  # u and v of a label that the votes contradict: u^2 = v^2 = 0.982, a logit of 4

_CHUNK_ENTRIES = 1 << 22  # entries of v per chunk when a full table is converted or summarised


class RowBlock(NamedTuple):
    """The columns of some rows that the loss reads: u (R,), v (R, K or M) and, for slots, classes (R, M)."""

    u: Tensor
    v: Tensor
    classes: Tensor | None = None


def corrected_labels(block: RowBlock, rows: Tensor, labels: Tensor) -> Tensor:
    """The label (B,) of each of these rows or, where it is absorbed, the class of its largest v^2: v_k^2 > 1 - u^2."""
    size = block.v[rows].abs()  # (B, K or M)
    classes = torch.arange(size.shape[1], device=size.device).expand_as(size)
    if block.classes is not None:
        classes = block.classes[rows].to(torch.int64)
    best, where = size.masked_fill(classes == labels[:, None], 0).max(dim=1)
    absorbed = best.square() > (1 - block.u[rows].square()).clamp_min(ACTIVE)
    return torch.where(absorbed, classes.gather(1, where[:, None])[:, 0], labels)


def class_dtype(num_classes: int) -> torch.dtype:
    """Smallest integer dtype that holds every class index and -1."""
    return torch.int16 if num_classes <= torch.iinfo(torch.int16).max else torch.int32


def row_bytes(layout: Layout, num_classes: int, slots: int = DEFAULT_SLOTS) -> int:
    """Bytes of one row: u, three running means, visits, and the layout's own columns."""
    shared = 5 * 4
    if layout == "dense":
        return shared + 4 * num_classes
    return shared + slots * (4 + class_dtype(num_classes).itemsize) + 4 + 4


def row_wire_bytes(layout: Layout, num_classes: int, slots: int = DEFAULT_SLOTS) -> int:
    """Bytes of a row when it is sent to another rank: u, v and, for slots, the classes."""
    if layout == "dense":
        return 4 + 4 * num_classes
    return 4 + min(slots, num_classes) * (4 + class_dtype(num_classes).itemsize)


def choose_layout(num_samples: int, num_classes: int, slots: int = DEFAULT_SLOTS) -> Layout:
    """The layout that `auto` resolves to: dense if it is small, or no larger than slots; otherwise slots.

    It depends on the full dataset, not on the slice of one rank, so every world size gets the same table.
    """
    dense, sparse = (row_bytes(layout, num_classes, min(slots, num_classes)) for layout in saved_table.LAYOUTS)
    return "dense" if dense <= sparse or num_samples * dense <= AUTO_DENSE_BYTES else "slots"


class NoiseTable(SampleTable):
    """Rows of u, v and running means, always in float32, whatever the dtype of the module."""

    sent = ("u", "v", "classes")

    u: Tensor
    v: Tensor
    classes: Tensor | None
    mean_loss: Tensor
    mean_margin: Tensor
    mean_fit: Tensor
    visits: Tensor
    skipped: Tensor
    evictions: Tensor | None
    evicted: Tensor | None

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
        super().__init__(num_samples, num_classes, seed=seed, first=first, stride=stride)
        self._voting = False
        check_integer("slots", slots, minimum=1)
        if layout not in ("auto", *saved_table.LAYOUTS):
            raise ValueError(f"layout must be 'auto', 'dense' or 'slots', got {layout!r}")
        self.slots = min(slots, num_classes)
        self.layout: Layout = choose_layout(num_samples, num_classes, slots) if layout == "auto" else layout

        # Dtypes and devices are explicit: users can change torch's defaults, and a bfloat16 table would never learn.
        samples = first + stride * torch.arange(len(self), device=device)
        rows, device = len(samples), samples.device
        floats: dict[str, Any] = {"dtype": torch.float32, "device": device}
        self.register_buffer("u", initial_u(seed, samples))
        if self.layout == "dense":
            self.register_buffer("v", fill_initial_v(torch.empty(rows, num_classes, **floats), seed, samples))
            for name in ("classes", "evictions", "evicted"):
                self.register_buffer(name, None)
        else:
            self.register_buffer("v", torch.zeros(rows, self.slots, **floats))
            free = torch.full((rows, self.slots), saved_table.FREE, dtype=class_dtype(num_classes), device=device)
            self.register_buffer("classes", free)
            self.register_buffer("evictions", torch.zeros(rows, dtype=torch.int32, device=device))
            self.register_buffer("evicted", torch.zeros(rows, **floats))
        self.register_buffer("mean_loss", torch.zeros(rows, **floats))
        self.register_buffer("mean_margin", torch.zeros(rows, **floats))
        self.register_buffer("mean_fit", torch.zeros(rows, **floats))
        self.register_buffer("visits", torch.zeros(rows, dtype=torch.int32, device=device))
        # Samples that were ignored: [weight 0 or out of range, logits not finite].
        self.register_buffer("skipped", torch.zeros(2, dtype=torch.int64, device=device))
        layout_and_slots = saved_table.LAYOUTS.index(self.layout), self.slots if self.layout == "slots" else 0
        self.register_meta(saved_table.FORMAT_VERSION, *layout_and_slots, 0, device=device)

    @property
    def voting(self) -> bool:
        """Whether u and v still count votes."""
        return self._voting

    @voting.setter
    def voting(self, value: bool) -> None:
        self._voting = value
        self.meta[saved_table.VOTING] = int(value)

    def act(self, least: float = 0.0) -> None:
        """End the vote: rows whose votes contradict the label start with the noise term for that class, others at 0.

        Votes of a row whose confidence is below `least` are ignored.
        """
        assert self.voting
        for part in self.parts():
            self._act(part, least)
        self.voting = False

    def confidence(self) -> Tensor:
        """Mean probability of the class that the visits favoured, (R,): the label, or the best other one."""
        return self.mean_fit - self.mean_margin.clamp_max(0)

    def evidence(self) -> Tensor:
        """Counts of these rows for `evidence.weigh`."""
        return count(self.mean_fit, self.mean_margin, self.visits > 0)

    def _act(self, part: slice, least: float) -> None:
        contradicted, class_ = self._vote(part)
        contradicted &= self.confidence()[part] >= least
        samples = self.samples_of(part)
        self.u[part] = initial_u(self.seed, samples).where(~contradicted, START)
        if self.classes is None:
            fill_initial_v(self.v[part], self.seed, samples)
            rows = contradicted.nonzero()[:, 0]
            self.v[part][rows, class_[rows]] = START
        else:
            self.v[part], self.classes[part] = 0, saved_table.FREE
            self.v[part, 0] = torch.where(contradicted, START, 0.0)
            self.classes[part, 0] = class_.where(contradicted, saved_table.FREE).to(self.classes.dtype)

    def votes(self) -> tuple[Tensor, Tensor]:
        """While voting: whether the votes contradict the label of each row, and in favour of which class, (R,) each."""
        parts = [self._vote(part) for part in self.parts()]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])

    def _vote(self, part: slice) -> tuple[Tensor, Tensor]:
        most, class_ = self.v[part].max(dim=1)  # the lowest class on ties
        if self.classes is not None:
            tied = (self.v[part] == most[:, None]) & (self.classes[part] != saved_table.FREE)
            class_ = self.classes[part].to(torch.int64).where(tied, self.num_classes).min(dim=1).values
        return most > self.u[part].clamp_min(_SMALLEST_VOTE), class_

    def extra_repr(self) -> str:
        """One line for `print(model)`."""
        kept = f", slots={self.slots}" if self.layout == "slots" else ""
        visited = "" if self.u.is_meta else f"{int((self.visits > 0).sum()):,} of "
        size = f"{self.nbytes:,} bytes"
        return f"{visited}{self.num_samples:,} samples visited, {self.num_classes} classes, {self.layout}{kept}, {size}"

    @property
    def nbytes(self) -> int:
        """Memory of the rows in bytes."""
        return len(self) * row_bytes(self.layout, self.num_classes, self.slots)

    @property
    def block(self) -> RowBlock:
        """All rows, as the loss kernel reads them."""
        return RowBlock(self.u, self.v, self.classes)

    def dense_v(self, rows: Tensor) -> Tensor:
        """v of all classes for these rows, (len(rows), K), in either layout."""
        if self.classes is None:
            return self.v[rows]
        out = torch.empty(len(rows), self.num_classes, dtype=torch.float32, device=self.v.device)
        return saved_table.scatter_slots(
            fill_initial_v(out, self.seed, self.samples_of(rows)), self.classes[rows], self.v[rows]
        )

    def strongest(self, labels: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Largest v^2 of each row and its class, (R,) each. With `labels` (R,), the label's own entry is ignored.

        A slots row without entries yields 0 and class 0.
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
        """Slices of the rows, each small enough for a dense temporary tensor."""
        step = max(1, _CHUNK_ENTRIES // self.num_classes)
        return (slice(start, start + step) for start in range(0, max(len(self), 1), step))

    def load_rows(self, columns: Mapping[str, Tensor]) -> int:
        """Load saved rows of either layout. Return the number of entries that did not fit into the slots."""
        self.load_state_dict(dict(columns))  # `saved_table` checks them, and converts
        if self.evictions is None:
            return 0
        before = int(columns["evictions"].sum()) if "evictions" in columns else 0
        return int(self.evictions.sum()) - before

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
        """Called by `load_state_dict`. `saved_table` checks everything, then copies or converts."""
        found = {key[len(prefix) :]: value for key, value in state_dict.items() if key.startswith(prefix)}
        foreign = [prefix + name for name in sorted(found.keys() - saved_table.KEYS)] if strict else []
        unexpected_keys.extend(foreign)
        if "meta" not in found:
            missing_keys.append(prefix + "meta")
        if foreign or "meta" not in found:
            return
        try:
            saved_table.load(self, found)
        except ValueError as problem:
            error_msgs.append(f"the noise table does not fit: {problem}")
