"""Synthetic label noise: rates and targets against exact expectations, and bits that never change."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from sopdist.data.labelling.noise import (
    CIFAR10_PAIRS,
    check_matrix,
    draw_exclusive,
    draw_matrix,
    draw_pairs,
    draw_symmetric,
    measured_rate,
    preset_pairs,
)
from sopdist.errors import DataError

K = 10
MANY = np.repeat(np.arange(K, dtype=np.int32), 20_000)

labels_of_five = st.lists(st.integers(-1, 4), max_size=60).map(lambda values: np.array(values, dtype=np.int32))
rates = st.floats(0, 1)
seeds = st.integers(0, 2**64 - 1)


def expect(before: NDArray[np.int32], after: NDArray[np.int32], matrix: NDArray[np.float64]) -> None:
    """Chi-square test of the transition counts against `matrix`; transitions of probability 0 never occur."""
    counts = np.zeros(matrix.shape)
    np.add.at(counts, (before, after), 1)
    assert (counts[matrix == 0] == 0).all()
    expected = matrix * counts.sum(axis=1, keepdims=True)
    possible = matrix > 0
    chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    freedom = possible.sum() - len(matrix)
    # Chi-square has mean f and variance 2f: allow five standard deviations on either side.
    assert abs(chi_square - freedom) <= 5 * np.sqrt(2 * freedom)


def identity_mixed_with(other: NDArray[np.float64], rate: float) -> NDArray[np.float64]:
    return (1 - rate) * np.eye(K) + rate * other


@pytest.mark.parametrize("rate", [0.2, 0.8, 1.0])
def test_symmetric_noise_resamples_from_all_classes(rate: float) -> None:
    noisy = draw_symmetric(MANY, K, rate, seed=1)
    expect(MANY, noisy, identity_mixed_with(np.full((K, K), 1 / K), rate))
    spread = np.sqrt(rate * (1 - 1 / K) * (1 - rate * (1 - 1 / K)) / len(MANY))
    assert abs(measured_rate(MANY, noisy) - rate * (1 - 1 / K)) < 5 * spread


@pytest.mark.parametrize("rate", [0.2, 0.8, 1.0])
def test_exclusive_noise_resamples_from_the_other_classes(rate: float) -> None:
    others = (1 - np.eye(K)) / (K - 1)
    expect(MANY, draw_exclusive(MANY, K, rate, seed=2), identity_mixed_with(others, rate))


def test_pair_noise_only_follows_the_pairs() -> None:
    matrix = np.eye(K)
    for source, target in CIFAR10_PAIRS.items():
        matrix[source, source], matrix[source, target] = 0.6, 0.4
    expect(MANY, draw_pairs(MANY, CIFAR10_PAIRS, K, 0.4, seed=3), matrix)


def test_matrix_noise_follows_each_row() -> None:
    matrix = np.random.default_rng(0).dirichlet(np.ones(K), size=K)
    matrix[3] = np.eye(K)[7]
    matrix[4, ::2] = 0
    matrix[4] /= matrix[4].sum()
    expect(MANY, draw_matrix(MANY, matrix, seed=4), matrix)


def test_the_noise_is_bit_identical_in_every_version() -> None:
    """If this fails, existing noisy label sets can no longer be reproduced: fix the code, not the test."""
    labels = np.array([0, 1, 2, 3, 4, -1, 0, 1, 2, 3, 4, 0], dtype=np.int32)
    matrix = np.full((5, 5), 0.2)
    drawn = [
        draw_symmetric(labels, 5, 0.5, seed=0),
        draw_exclusive(labels, 5, 0.5, seed=0),
        draw_pairs(labels, {0: 1, 3: 2}, 5, 0.5, seed=0),
        draw_matrix(labels, matrix, seed=0),
        draw_symmetric(labels, 5, 0.5, seed=2**64 - 1),
    ]
    assert [row.tolist() for row in drawn] == [
        [0, 1, 1, 0, 4, -1, 0, 3, 1, 3, 2, 0],
        [0, 1, 1, 2, 4, -1, 3, 3, 4, 3, 2, 0],
        [0, 1, 2, 2, 4, -1, 1, 1, 2, 3, 4, 0],
        [0, 1, 2, 1, 1, -1, 0, 4, 4, 0, 3, 1],
        [0, 1, 4, 0, 4, -1, 2, 0, 1, 0, 4, 0],
    ]


def philox_4x64_10(key: tuple[int, int], counter: int) -> list[int]:
    """Philox as in the paper (Salmon et al. 2011), in Python integers."""
    mask = 2**64 - 1
    x, (k0, k1) = [counter, 0, 0, 0], key
    for _ in range(10):
        first, second = x[0] * 0xD2E7470EE14C6C93, x[2] * 0xCA5A826395121157
        x = [(second >> 64) ^ x[1] ^ k0, second & mask, (first >> 64) ^ x[3] ^ k1, first & mask]
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & mask, (k1 + 0xBB67AE8584CAA73B) & mask
    return x


@given(labels_of_five, rates, seeds)
def test_the_documented_algorithm_gives_the_same_labels_without_numpy(
    labels: NDArray[np.int32], rate: float, seed: int
) -> None:
    key = (seed, int.from_bytes(b"labels", "big"))
    words = [word for block in range(len(labels)) for word in philox_4x64_10(key, block + 1)]
    expected = [
        which % 5 if label != -1 and (whether >> 11) / 2**53 < rate else label
        for label, whether, which in zip(labels.tolist(), words[0::2], words[1::2], strict=False)
    ]
    assert draw_symmetric(labels, 5, rate, seed).tolist() == expected


@given(labels_of_five, seeds)
def test_rate_0_changes_nothing(labels: NDArray[np.int32], seed: int) -> None:
    for drawn in (
        draw_symmetric(labels, 5, 0, seed),
        draw_exclusive(labels, 5, 0, seed),
        draw_pairs(labels, preset_pairs("next", 5), 5, 0, seed),
        draw_matrix(labels, np.eye(5), seed),
    ):
        np.testing.assert_array_equal(drawn, labels)


@given(labels_of_five, rates, seeds)
def test_unknown_labels_stay_unknown_and_no_others_become_unknown(
    labels: NDArray[np.int32], rate: float, seed: int
) -> None:
    for drawn in (
        draw_symmetric(labels, 5, rate, seed),
        draw_exclusive(labels, 5, rate, seed),
        draw_pairs(labels, {0: 3}, 5, rate, seed),
        draw_matrix(labels, np.full((5, 5), 0.2), seed),
    ):
        np.testing.assert_array_equal(drawn == -1, labels == -1)
        assert drawn.dtype == np.int32
        assert ((drawn >= -1) & (drawn < 5)).all()


@given(labels_of_five, seeds)
def test_exclusive_noise_never_returns_the_old_label(labels: NDArray[np.int32], seed: int) -> None:
    drawn = draw_exclusive(labels, 5, 1.0, seed)
    assert (drawn != labels)[labels != -1].all()


@given(labels_of_five, st.dictionaries(st.integers(0, 4), st.integers(0, 4)), rates, seeds)
def test_pairs_give_the_old_class_or_its_pair(
    labels: NDArray[np.int32], pairs: dict[int, int], rate: float, seed: int
) -> None:
    for old, new in zip(labels.tolist(), draw_pairs(labels, pairs, 5, rate, seed).tolist(), strict=True):
        assert new in (old, pairs.get(old, old))


@given(labels_of_five, st.lists(st.permutations(range(5)), min_size=5, max_size=5), seeds)
def test_matrix_noise_never_gives_a_class_of_probability_0(
    labels: NDArray[np.int32], orders: list[list[int]], seed: int
) -> None:
    matrix = np.array([[0, 0, 0, 0.25, 0.75]] * 5)
    for row, order in zip(matrix, orders, strict=True):
        row[:] = row[order]
    known = labels != -1
    assert (matrix[labels[known], draw_matrix(labels, matrix, seed)[known]] > 0).all()


@given(labels_of_five, rates, rates, seeds)
def test_a_lower_rate_changes_a_subset_of_what_a_higher_rate_changes(
    labels: NDArray[np.int32], one: float, other: float, seed: int
) -> None:
    low, high = sorted((one, other))
    few, many = draw_exclusive(labels, 5, low, seed), draw_exclusive(labels, 5, high, seed)
    np.testing.assert_array_equal(few[few != labels], many[few != labels])


@given(labels_of_five, st.integers(0, 60), rates, seeds)
def test_a_sample_depends_on_its_own_index_only(labels: NDArray[np.int32], count: int, rate: float, seed: int) -> None:
    everything = draw_symmetric(labels, 5, rate, seed)
    np.testing.assert_array_equal(draw_symmetric(labels[:count], 5, rate, seed), everything[:count])


def test_different_seeds_are_independent() -> None:
    drawn = [draw_exclusive(MANY, K, 0.5, seed) != MANY for seed in (0, 1, 2**63)]
    for a, b in itertools.combinations(drawn, 2):
        assert abs((a == b).mean() - 0.5) < 5 * 0.5 / np.sqrt(len(MANY))


def test_presets() -> None:
    assert preset_pairs("cifar10", 10) == {9: 1, 2: 0, 3: 5, 5: 3, 4: 7}
    assert preset_pairs("next", 3) == {0: 1, 1: 2, 2: 0}
    hundred = preset_pairs("cifar100", 100)
    assert [hundred[k] for k in (0, 3, 4, 5, 9, 95, 99)] == [1, 4, 0, 6, 5, 96, 95]
    for preset in ("cifar10", "cifar100"):
        with pytest.raises(DataError, match="the split has 7"):
            preset_pairs(preset, 7)


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (np.eye(3), r"shape \(3, 3\), expected 2 x 2"),
        (np.array([["a", "b"]] * 2), "expected 2 x 2 numbers"),
        (np.array([[1.0, 0.0], [1.5, -0.5]]), r"row 1, column 1 \(from 0\) is -0.5"),
        (np.array([[np.nan, 1.0], [0.5, 0.5]]), "is nan, not a probability"),
        (np.array([[np.inf, 1.0], [0.5, 0.5]]), "row 0 .* sums to inf"),
        (np.array([[1.0, 0.0], [0.5, 0.4]]), r"m.csv: row 1 \(from 0\) sums to 0.9, not 1"),
    ],
)
def test_an_invalid_transition_matrix_is_refused(matrix: NDArray[np.float64], message: str) -> None:
    with pytest.raises(DataError, match=message):
        check_matrix(matrix, 2, "m.csv")


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: draw_symmetric(MANY, K, 1.5, 0), "rate 1.5: must be from 0 to 1"),
        (lambda: draw_symmetric(MANY, K, float("nan"), 0), "rate nan"),
        (lambda: draw_symmetric(MANY, K, 0.5, -1), "seed -1"),
        (lambda: draw_symmetric(MANY, K, 0.5, 2**64), "seed"),
        (lambda: draw_exclusive(MANY, 1, 0.5, 0), "at least two classes"),
        (lambda: draw_pairs(MANY, {3: 10}, K, 0.5, 0), "pair 3:10: classes must be from 0 to 9"),
    ],
)
def test_invalid_noise_parameters_are_refused(draw: Callable[[], object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        draw()


def test_the_measured_rate_ignores_unknown_labels() -> None:
    before = np.array([0, 1, -1, 2], dtype=np.int32)
    assert measured_rate(before, np.array([0, 2, 1, -1], dtype=np.int32)) == 0.5
    assert measured_rate(before[:0], before[:0]) == 0.0
