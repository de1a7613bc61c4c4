"""Synthetic label noise as a pure function of (labels, kind, rate, seed).

The result must be the same on every machine and with every version of NumPy; otherwise two users with the same seed
would train on different labels. NumPy guarantees this for the raw words of its bit generators, but not for the methods
of `Generator`. So noise is computed from raw words of Philox-4x64-10 with the key (seed, STREAM) and the counters
1, 2, 3, ..., which give four words each. Every sample has two words, in index order:

    whether   the upper 53 bits as a number u in [0, 1): the label is resampled if u < rate
    which     the new label: modulo the number of choices (the bias is below K / 2^64), or, for a matrix, the upper 53
              bits as a number in [0, 1) that is looked up in the cumulative probabilities of the label's row

Every sample consumes its two words, whether needed or not. So with the same seed, the labels resampled at rate 0.2 are
a subset of those resampled at 0.4 and get the same new labels, and an unknown label, which stays unknown, does not
affect other samples.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from ..labels import UNKNOWN, Labels

STREAM = int.from_bytes(b"labels", "big")  # separates label noise from other random numbers with the same seed
SEEDS = 1 << 64
_ROW_TOLERANCE = 1e-6  # largest difference of a row sum from 1: matrices in text files are rounded

Words = NDArray[np.uint64]

CIFAR10_PAIRS = {9: 1, 2: 0, 3: 5, 5: 3, 4: 7}  # truck -> automobile, bird -> airplane, cat <-> dog, deer -> horse
PRESETS = {
    "cifar10": "truck -> automobile, bird -> airplane, cat <-> dog, deer -> horse (10 classes, in CIFAR-10's order)",
    "cifar100": "each class -> the next in its block of five, the fifth -> the first (100 classes)",
    "next": "each class -> the next, the last -> the first (any number of classes)",
}


def draw_symmetric(labels: Labels, classes: int, rate: float, seed: int) -> Labels:
    """With probability `rate`, resample from all classes, including the old one: rate * (1 - 1/K) become wrong."""
    whether, which = _words(seed, len(labels))
    new = (which % np.uint64(classes)).astype(np.int32)
    return _replace(labels, new, _uniform(whether) < _checked(rate))


def draw_exclusive(labels: Labels, classes: int, rate: float, seed: int) -> Labels:
    """With probability `rate`, resample from all classes except the old one: `rate` become wrong."""
    if classes < 2:
        raise DataError("exclusive noise needs at least two classes")
    whether, which = _words(seed, len(labels))
    new = (which % np.uint64(classes - 1)).astype(np.int32)
    new += new >= labels  # skip the old one
    return _replace(labels, new, _uniform(whether) < _checked(rate))


def draw_pairs(labels: Labels, pairs: Mapping[int, int], classes: int, rate: float, seed: int) -> Labels:
    """With probability `rate`, replace a label that is a key of `pairs` by its value; other labels do not change."""
    whether, _ = _words(seed, len(labels))
    targets = np.arange(classes, dtype=np.int32)
    for source, target in pairs.items():
        if not (0 <= source < classes and 0 <= target < classes):
            raise DataError(f"pair {source}:{target}: classes must be from 0 to {classes - 1}")
        targets[source] = target
    return _replace(labels, targets[labels], _uniform(whether) < _checked(rate))


def draw_matrix(labels: Labels, matrix: NDArray[Any], seed: int) -> Labels:
    """Replace label k by j with probability `matrix[k, j]`; see `check_matrix`."""
    _, which = _words(seed, len(labels))
    cumulative = np.cumsum(matrix, axis=1)  # (K, K); summed sequentially, so the bits are the same everywhere
    cumulative /= cumulative[:, -1:]
    uniform = _uniform(which)
    new = np.full_like(labels, UNKNOWN)
    # `order` groups samples by label, so that each row is searched once.
    order = np.argsort(labels, kind="stable")
    ends = np.searchsorted(labels, np.arange(-1, len(matrix)), side="right", sorter=order)
    for label, (start, stop) in enumerate(itertools.pairwise(ends)):
        of_label = order[start:stop]
        # The first class whose cumulative probability exceeds u; it never has probability 0.
        new[of_label] = np.searchsorted(cumulative[label], uniform[of_label], side="right")
    return new


def preset_pairs(preset: str, classes: int) -> dict[int, int]:
    """The pairs of a preset, which must be in PRESETS."""
    needed = {"cifar10": 10, "cifar100": 100}.get(preset, classes)
    if classes != needed:
        raise DataError(f"--preset {preset}: needs {needed} classes, the split has {classes}; use --pairs")
    if classes < 2:
        raise DataError(f"--preset {preset}: needs at least two classes")
    if preset == "cifar10":
        return dict(CIFAR10_PAIRS)
    block = 5 if preset == "cifar100" else classes
    return {k: k // block * block + (k + 1) % block for k in range(classes)}


def check_matrix(matrix: NDArray[Any], classes: int, where: str) -> NDArray[np.float64]:
    """Check for K x K probabilities whose rows sum to 1; returns them as float64."""
    if matrix.shape != (classes, classes) or matrix.dtype.kind not in "fiu":
        raise DataError(f"{where}: {matrix.dtype} of shape {matrix.shape}, expected {classes} x {classes} numbers")
    matrix = matrix.astype(np.float64)
    bad = np.argwhere(~(matrix >= 0))  # also: not a number
    if len(bad):
        row, column = map(int, bad[0])
        raise DataError(f"{where}: row {row}, column {column} (from 0) is {matrix[row, column]}, not a probability")
    sums = matrix.sum(axis=1)
    off = np.flatnonzero(~(np.abs(sums - 1) <= _ROW_TOLERANCE))
    if len(off):
        raise DataError(
            f"{where}: row {off[0]} (from 0) sums to {sums[off[0]]:.8g}, not 1 ({len(off)} such rows); "
            "row k must hold the probabilities of the labels that replace label k"
        )
    return matrix


def measured_rate(before: Labels, after: Labels) -> float:
    """Fraction of labels that differ, among those known in both; 0 if there are none."""
    known = (before != UNKNOWN) & (after != UNKNOWN)
    return float((before != after)[known].mean()) if known.any() else 0.0


def _words(seed: int, samples: int) -> tuple[Words, Words]:
    if not 0 <= seed < SEEDS:
        raise DataError(f"seed {seed}: must be from 0 to 2^64 - 1")
    key = np.array([seed, STREAM], dtype=np.uint64)
    words = np.random.Philox(key=key).random_raw(2 * samples).reshape(samples, 2)
    return words[:, 0], words[:, 1]


def _uniform(words: Words) -> NDArray[np.float64]:
    # Exact: there is no rounding, so no difference between machines.
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _checked(rate: float) -> float:
    if not 0 <= rate <= 1:
        raise DataError(f"rate {rate}: must be from 0 to 1")
    return rate


def _replace(labels: Labels, new: Labels, resampled: NDArray[np.bool_]) -> Labels:
    return np.where(resampled & (labels != UNKNOWN), new, labels).astype(np.int32)
