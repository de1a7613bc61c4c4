"""When the noise table starts to act: once the run itself shows that the network has begun to memorise labels.

Before that, the loss is plain cross-entropy, and each row only counts votes. Acting earlier would cost accuracy: what a
network that has not learned yet contradicts is mostly correct. Never acting would cost more, once wrong labels are
memorised. The sign is taken from the visits of each *window*, which is one visit per sample, as an epoch is:

    fit       P = mean of p_y                                misfit D = 1 - P
    conflict  M = mean of log p_k - log p_y over the visits that contradict their label, k being the predicted class

While a network learns, the share of the misfit that an epoch removes, h_j = (D_{j-2} - D_j) / 2 D_{j-2}, falls at least
like 1/j: learning curves flatten. Labels that are memorised one by one, however, keep reducing the misfit, and j h_j
rises. Meanwhile M, which rises as long as the network becomes surer of what it has learned, begins to fall.
The gate opens after the first window j with both:

    j h_j >= RISE min_{i < j} i h_i + noise       noise: SIGMAS standard errors of j h_j
    S_j   <= (1 - FALL) max_{i <= j} S_i          S_j = (M_j + M_{j-1}) / 2

All sums are integers (fixed point), so the decision does not depend on the order of the visits or the number of ranks.
This file knows no tables and no tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Setting = Literal["auto", "never", "always"] | int

RISE = 1.5
FALL = 0.01
SIGMAS = 2.0
SMALLEST_SHARE = 0.005  # of the misfit per epoch; slower is not memorising
SPREAD = 0.25  # standard deviation of the change of p_y between two visits, at most
FIT_UNIT, CONFLICT_UNIT = 2**24, 2**16  # fixed point
_NONE_YET = 1e9  # j h_j is at most j / 2
STATE = 8  # numbers in `Onset.state`


@dataclass(frozen=True)
class Sums:
    """Integers summed over the visits of a window."""

    visits: int
    fit: int  # p_y, in units of 1 / FIT_UNIT
    contradicted: int  # visits
    conflict: int  # log p_k - log p_y over these, in units of 1 / CONFLICT_UNIT


class Onset:
    """Decides, window by window, whether the table acts."""

    def __init__(self, setting: Setting = "auto") -> None:
        self.setting = check_setting(setting)
        self.opened: int | None = 0 if setting == "always" else None  # windows before it opened; None: still closed
        self.windows = 0  # so far
        self._misfit = (0.0, 0.0)  # of the last two windows
        self._conflict = 0.0  # of the last window
        self._lowest = _NONE_YET  # j h_j
        self._peak = 0.0  # S_j
        self.strength = 0.0  # of the sign: j h_j of the last window, relative to what would open the gate

    def close_window(self, sums: Sums) -> bool:
        """Take note of a window. True if the gate opens with it."""
        self.windows += 1
        if self.opened is not None:
            return False
        memorising = self._is_memorising(sums)
        if memorising if self.setting == "auto" else self.windows == self.setting:
            self.opened = self.windows
        return self.opened is not None

    def _is_memorising(self, sums: Sums) -> bool:
        if not sums.visits:
            return False
        misfit = 1 - sums.fit / FIT_UNIT / sums.visits
        conflict = sums.conflict / CONFLICT_UNIT / sums.contradicted if sums.contradicted else 0.0
        smooth = (conflict + self._conflict) / 2
        if self.windows > 1:
            self._peak = max(self._peak, smooth)
        falls = self.windows > 1 and smooth <= (1 - FALL) * self._peak
        before = self._misfit[0]
        self._misfit, self._conflict = (self._misfit[1], misfit), conflict
        if self.windows < 3 or before <= 0:
            return False
        share = (before - misfit) / 2 / before
        noise = SIGMAS * SPREAD / math.sqrt(2 * sums.visits) / before
        needed = max(SMALLEST_SHARE, RISE * self._lowest / self.windows + noise)
        self._lowest = min(self._lowest, max(share, 0.0) * self.windows)
        self.strength = max(share, 0.0) / needed
        return share >= needed and falls

    def state(self) -> list[float]:
        """All that a resumed run needs, as STATE numbers."""
        opened = -1 if self.opened is None else self.opened
        return [opened, self.windows, *self._misfit, self._conflict, self._lowest, self._peak, self.strength]

    def load_state(self, state: Sequence[float]) -> None:
        """Take over what `state` returned."""
        opened, windows, older, newer, self._conflict, self._lowest, self._peak, self.strength = state
        self.opened, self.windows, self._misfit = None if opened < 0 else int(opened), int(windows), (older, newer)


def check_setting(setting: Setting) -> Setting:
    """ValueError unless it is one of the three words, or a number of epochs."""
    if isinstance(setting, str) and setting in ("auto", "never", "always"):
        return setting
    if isinstance(setting, int) and not isinstance(setting, bool) and setting >= 1:
        return setting
    raise ValueError(f"onset must be 'auto', 'never', 'always' or a number of epochs >= 1, got {setting!r}")
