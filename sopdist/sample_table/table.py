"""The rows that one rank owns: columns as buffers of an `nn.Module`.

A table holds every `stride`-th sample: row r is sample `first + r * stride`, so rank 1 of 3 owns samples 1, 4, 7, ...

A subclass registers its columns as buffers of shape (rows, ...), lists those that other ranks need in `sent`, and calls
`register_meta` last. It may register `skipped`, a counter of samples that is not a row but is saved with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

# The start of every table's `meta`, a tensor of integers that is saved with the rows and describes them.
META = ("format", "num_samples", "num_classes", "seed", "first", "stride")


class SampleTable(nn.Module):
    """Columns with one row per sample. They follow `.to(device)` but keep their dtype."""

    sent: ClassVar[tuple[str, ...]] = ()  # columns needed by the rank that computes a sample; absent ones are None
    meta: Tensor

    def __init__(self, num_samples: int, num_classes: int, *, seed: int = 0, first: int = 0, stride: int = 1) -> None:
        super().__init__()
        check_integer("num_samples", num_samples, minimum=1)
        check_integer("num_classes", num_classes, minimum=2)
        check_integer("seed", seed, minimum=0, below=2**63)
        check_integer("stride", stride, minimum=1)
        check_integer("first", first, minimum=0, below=stride)
        self.num_samples, self.num_classes, self.seed = num_samples, num_classes, seed
        self.first, self.stride = first, stride

    def __len__(self) -> int:
        return len(range(self.first, self.num_samples, self.stride))

    @property
    def device(self) -> torch.device:
        """The device of the rows."""
        return self.meta.device

    def register_meta(self, version: int, *more: int, device: torch.device | str | None = None) -> None:
        """Describe the table in the buffer `meta`: `META`, then anything else the subclass needs to load itself."""
        numbers = (version, self.num_samples, self.num_classes, self.seed, self.first, self.stride)
        self.register_buffer("meta", torch.tensor([*numbers, *more], device=device))

    def sent_columns(self) -> list[Tensor]:
        """The columns that are sent. Not cached, because `.to(device)` replaces buffers."""
        columns = (getattr(self, name) for name in self.sent)
        return [column for column in columns if column is not None]

    def samples_of(self, rows: Tensor | slice) -> Tensor:
        """Sample indices of local rows."""
        if isinstance(rows, slice):
            rows = torch.arange(*rows.indices(len(self)), device=self.device)
        return rows.to(torch.int64) * self.stride + self.first

    def load_rows(self, columns: Mapping[str, Tensor]) -> int:
        """Load the state dict of this shard of the table; returns how many entries did not fit.

        ValueError if the rows belong to another table, or to another shard of it.
        """
        for name, there, here in zip(META, columns["meta"].tolist(), self.meta.tolist(), strict=False):
            if there != here:
                raise ValueError(f"the rows belong to another table: {name} is {there} there and {here} here")
        self.load_state_dict(dict(columns))
        return 0

    def _apply(self, fn: Any, recurse: bool = True) -> SampleTable:
        return super()._apply(keep_dtype(fn), recurse)


def keep_dtype(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Let `nn.Module._apply` move a buffer but not convert it: initial values of 1e-8 underflow in half precision."""

    def apply(buffer: Tensor) -> Tensor:
        out = fn(buffer)
        if buffer.is_meta and not out.is_meta:
            raise RuntimeError("create the table on its final device (device=...): empty memory has no initial values")
        return out if out.dtype == buffer.dtype else buffer.to(out.device)

    return apply


def check_integer(name: str, value: int, *, minimum: int, below: int | None = None) -> None:
    """ValueError unless `value` is an integer in range; a bool is not an integer here."""
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not is_integer or value < minimum or (below is not None and value >= below):
        limits = f"at least {minimum}" if below is None else f"in [{minimum}, {below})"
        raise ValueError(f"{name} must be an integer {limits}, got {value!r}")
