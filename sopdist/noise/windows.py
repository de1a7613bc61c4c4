"""The windows by which the onset of memorisation is recognised: sums over one visit per sample, on the device.

Every rank sums its own visits. The sums are integers, so that their total depends neither on the order of the visits
nor on the number of ranks. Knows nothing of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..sample_table.table import keep_dtype
from .kernels import DROPPED, LossResult
from .onset import CONFLICT_UNIT, FIT_UNIT, STATE, Onset, Setting, Sums

_LARGEST_CONFLICT = 1000.0  # a log margin; far beyond those of any network
_SUMS = 4


class Windows(nn.Module):
    """Sums of the current window, and the decision after each. `state` (float64) is saved with the table."""

    sums: Tensor
    state: Tensor

    def __init__(self, samples: int, setting: Setting, device: torch.device | str | None) -> None:
        super().__init__()
        self.gate = Onset(setting)
        self._samples = samples
        self._seen = 0  # of the current window, over all ranks
        self.register_buffer("sums", torch.zeros(_SUMS, dtype=torch.int64, device=device), persistent=False)
        # Stays on the CPU, where it is filled and read: some devices have no float64.
        self.register_buffer("state", torch.zeros(STATE + 1 + _SUMS, dtype=torch.float64, device="cpu"))

    def add(self, found: LossResult) -> None:
        """Add the visits of a batch. Does not wait for the device."""
        fit = (found.facts.fit * FIT_UNIT).round().to(torch.int64)  # units are powers of 2: exact in float32
        conflict = found.log_margin.clamp(0, _LARGEST_CONFLICT)
        conflict = (conflict * CONFLICT_UNIT).round().to(torch.int64)
        columns = (found.facts.predicted != DROPPED, fit, found.log_margin > 0, conflict)
        self.sums += torch.stack([column.sum() for column in columns])

    def count(self, samples: int) -> None:
        """Take note of samples that were visited, over all ranks."""
        self._seen += samples

    @property
    def complete(self) -> bool:
        """Whether there was one visit per sample."""
        return self._seen >= self._samples

    def end(self, reduce: Callable[[Tensor], Tensor]) -> bool:
        """End the window; `reduce` sums over ranks. True if the table acts from now on. Waits for the device."""
        total = Sums(*(int(value) for value in reduce(self.sums).tolist()))
        self.sums.zero_()
        self._seen = 0
        return self.gate.close_window(total)

    def save(self, reduce: Callable[[Tensor], Tensor]) -> Tensor:
        """Fill and return `state`, identical on every rank. Collective if `reduce` is."""
        numbers = [*self.gate.state(), self._seen, *reduce(self.sums).tolist()]
        self.state.copy_(torch.tensor(numbers, dtype=torch.float64))
        return self.state

    def load(self, state: Tensor, *, first_rank: bool) -> None:
        """Take over what `save` returned; the sums go to the first rank."""
        *gate, seen, _, _, _, _ = state.tolist()
        self.gate.load_state(gate)
        self._seen = int(seen)
        sums = state[-_SUMS:].to(torch.int64)
        self.sums.copy_(sums if first_rank else torch.zeros_like(sums))
        self.state.copy_(state)

    def _apply(self, fn: Any, recurse: bool = True) -> Windows:
        move = keep_dtype(fn)
        return super()._apply(lambda buffer: buffer if buffer is self.state else move(buffer), recurse)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        """A table saved by a version without onset has no state, which is not an error: it always acted."""
        found = state_dict.get(f"{prefix}state")
        super()._load_from_state_dict(
            {**state_dict, f"{prefix}state": self.state if found is None else found}, prefix, *args
        )
