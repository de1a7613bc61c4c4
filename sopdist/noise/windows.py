"""The windows by which the onset of memorisation is recognised: sums over one visit per sample, on the device.

Every rank sums the visits to its own rows. The sums are integers, so that their total depends neither on the order of
the visits nor on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..sample_table.table import keep_dtype
from .evidence import Evidence
from .kernels import DROPPED, Facts
from .onset import CONTRADICTED, EARLIER_VISITS, STATE, UNIT, Onset, Setting, Sums
from .rows import NoiseTable

_SUMS, _EVIDENCE = 3, len(Evidence._fields)
_SAVED = STATE + _EVIDENCE + 1 + _SUMS  # numbers in `state`
_EARLIER_STATE = 13  # numbers that the state had when the gate looked for another sign


class Windows(nn.Module):
    """Sums of the current window, and the decision after each. `state` (float64) is saved with the table."""

    sums: Tensor
    state: Tensor

    def __init__(self, samples: int, setting: Setting, device: torch.device | str | None) -> None:
        super().__init__()
        self.gate = Onset(setting)
        self.evidence: Evidence | None = None  # that the rows gave when the gate opened
        self._samples = samples
        self._seen = 0  # of the current window, over all ranks
        self.register_buffer("sums", torch.zeros(_SUMS, dtype=torch.int64, device=device), persistent=False)
        # Stays on the CPU, where it is filled and read: some devices have no float64.
        self.register_buffer("state", torch.zeros(_SAVED, dtype=torch.float64, device="cpu"))

    def add(self, table: NoiseTable, rows: Tensor, facts: Facts) -> None:
        """Add visits to these rows, before they are updated. Does not wait for the device."""
        if self.gate.windows < EARLIER_VISITS:
            return
        contradicted = (table.mean_margin[rows] < -CONTRADICTED) & (facts.predicted != DROPPED)
        fit = facts.fit
        columns = torch.stack((torch.ones_like(fit), fit, fit * fit))  # (3, B)
        units = (columns * contradicted * UNIT).round_().to(torch.int64)  # UNIT is a power of 2: exact
        self.sums += units.sum(dim=1)

    def count(self, samples: int) -> None:
        """Take note of samples that were visited, over all ranks."""
        self._seen += samples

    @property
    def complete(self) -> bool:
        """Whether there was one visit per sample."""
        return self._seen >= self._samples

    def end(self, reduce: Callable[[Tensor], Tensor]) -> bool:
        """End the window; `reduce` sums over ranks. True if the table acts from now on. Waits for the device."""
        visits, fit, square = reduce(self.sums).tolist()
        self.sums.zero_()
        self._seen = 0
        return self.gate.close_window(Sums(visits // UNIT, fit, square))

    def save(self, reduce: Callable[[Tensor], Tensor]) -> Tensor:
        """Fill and return `state`, identical on every rank. Collective if `reduce` is."""
        evidence = [-1.0] * _EVIDENCE if self.evidence is None else self.evidence
        numbers = [*self.gate.state(), *evidence, self._seen, *reduce(self.sums).tolist()]
        self.state.copy_(torch.tensor(numbers, dtype=torch.float64))
        return self.state

    def load(self, state: Tensor, *, first_rank: bool) -> None:
        """Take over what `save` returned; the sums go to the first rank."""
        state = _converted(state)
        numbers = state.tolist()
        gate, evidence, seen = numbers[:STATE], numbers[STATE : STATE + _EVIDENCE], numbers[STATE + _EVIDENCE]
        self.gate.load_state(gate)
        self.evidence = None if evidence[0] < 0 else Evidence(*evidence)
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
        state = self.state if found is None else _converted(found)
        super()._load_from_state_dict({**state_dict, f"{prefix}state": state}, prefix, *args)


def _converted(state: Tensor) -> Tensor:
    """The state of an earlier version keeps the decision and the position; a closed gate compares from there on."""
    if len(state) != _EARLIER_STATE:
        return state
    opened, windows, seen = (float(state[position]) for position in (0, 1, 8))
    gate = Onset("auto")
    gate.opened, gate.windows = None if opened < 0 else int(opened), int(windows)
    return torch.tensor([*gate.state(), *[-1.0] * _EVIDENCE, seen, *[0.0] * _SUMS], dtype=torch.float64)
