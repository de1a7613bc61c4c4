"""When the noise table starts to act: once the run itself shows that the network has begun to memorise labels.

Before that, the loss is plain cross-entropy, and each row only counts votes. Acting earlier would cost accuracy: what a
network that has not learned yet contradicts is mostly correct. Never acting would cost more, once wrong labels are
memorised. The sign comes from the samples whose label was contradicted by their earlier visits: those whose mean margin
is below -CONTRADICTED. For each *window*, which is one visit per sample, as an epoch is:

    B = mean of p_y over the visits to these samples

As long as a network learns what samples have in common, it becomes surer of what contradicts these labels, and B falls
or stays level, whatever the learning rate does. It rises only if the network learns these labels one by one: if it
memorises them. The gate opens after the first window j with

    B_j >= B_i + min(RISE, B_i / 2) + noise          i: the window with the smallest B among the LOOK_BACK before j
                                                     noise: SIGMAS standard errors of B_j - B_i

All sums are integers (fixed point), so the decision does not depend on the order of the visits or the number of ranks.
This file knows no tables and no tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Setting = Literal["auto", "never", "always"] | int

CONTRADICTED = 0.15  # mean margin, in probability, beyond which earlier visits contradict a label
EARLIER_VISITS = 2  # that samples have had when the first window counts: the first windows are not looked at
RISE = 0.02
SIGMAS = 3.0
LOOK_BACK = 8  # windows
FEWEST_VISITS = 20  # to such samples; a window with fewer says nothing
UNIT = 2**24  # fixed point
STATE = 3 + 2 * LOOK_BACK  # numbers in `Onset.state`


@dataclass(frozen=True)
class Sums:
    """Integers summed over the visits of a window to samples whose label was contradicted before."""

    visits: int
    fit: int  # p_y, in units of 1 / UNIT
    square: int  # p_y^2, in units of 1 / UNIT


class Onset:
    """Decides, window by window, whether the table acts."""

    def __init__(self, setting: Setting = "auto") -> None:
        self.setting = check_setting(setting)
        self.opened: int | None = 0 if setting == "always" else None  # windows before it opened; None: still closed
        self.windows = 0  # so far
        self.rise = 0.0  # of B in the last window, relative to what would open the gate
        self._recent: list[tuple[float, float]] = []  # B and its variance, of up to LOOK_BACK windows

    @property
    def fit(self) -> float | None:
        """B of the last window; None if there was none yet."""
        return self._recent[-1][0] if self._recent else None

    def close_window(self, sums: Sums) -> bool:
        """Take note of a window. True if the gate opens with it."""
        self.windows += 1
        if self.opened is not None:
            return False
        memorising = self._is_memorising(sums)
        if memorising if self.setting == "auto" else isinstance(self.setting, int) and self.windows >= self.setting:
            self.opened = self.windows
        return self.opened is not None

    def _is_memorising(self, sums: Sums) -> bool:
        if sums.visits < FEWEST_VISITS:
            return False
        fit = sums.fit / UNIT / sums.visits
        variance = max(sums.square / UNIT / sums.visits - fit * fit, 0.0) / sums.visits
        if self._recent:
            lowest, its_variance = min(self._recent)
            needed = min(RISE, lowest / 2) + SIGMAS * math.sqrt(variance + its_variance)
            self.rise = (fit - lowest) / needed if needed else 0.0
        self._recent = [*self._recent[1 - LOOK_BACK :], (fit, variance)]
        return self.rise >= 1

    def state(self) -> list[float]:
        """All that a resumed run needs, as STATE numbers."""
        opened = -1 if self.opened is None else self.opened
        recent = [*self._recent, *[(-1.0, -1.0)] * (LOOK_BACK - len(self._recent))]
        return [opened, self.windows, self.rise, *(number for pair in recent for number in pair)]

    def load_state(self, state: Sequence[float]) -> None:
        """Take over what `state` returned."""
        opened, windows, self.rise, *recent = state
        self.opened, self.windows = None if opened < 0 else int(opened), int(windows)
        pairs = zip(recent[::2], recent[1::2], strict=True)
        self._recent = [pair for pair in pairs if pair[0] >= 0]


def earliest(setting: Setting) -> float:
    """The first epoch, counted from 1, in which the table can act."""
    if isinstance(setting, int):
        return setting + 1
    return {"always": 1, "auto": EARLIER_VISITS + 3, "never": math.inf}[setting]  # auto compares two windows


def check_setting(setting: Setting) -> Setting:
    """ValueError unless it is one of the three words, or a number of epochs."""
    if isinstance(setting, str) and setting in ("auto", "never", "always"):
        return setting
    if isinstance(setting, int) and not isinstance(setting, bool) and setting >= 1:
        return setting
    raise ValueError(f"onset must be 'auto', 'never', 'always' or a number of epochs >= 1, got {setting!r}")
