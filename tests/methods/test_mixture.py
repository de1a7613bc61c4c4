"""The mixture of two normal distributions against scikit-learn, and at its limits."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sopdist.methods.mixture import scaled, small_component
from tests.support.two_normals import Array, rescaled, small_posterior

losses = st.lists(st.floats(0, 20, allow_subnormal=False), min_size=1, max_size=60)


def two_groups(seed: int, small: int, large: int, distance: float) -> Array:
    draws = np.random.default_rng(seed)
    return rescaled(np.concatenate([draws.exponential(0.3, small), distance + draws.normal(0, 1, large)]))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("small", "large"), [(300, 300), (500, 60), (60, 500)])
@pytest.mark.parametrize("distance", [0.5, 2.0, 6.0])
def test_the_result_is_that_of_scikit_learn_from_the_same_start(
    seed: int, small: int, large: int, distance: float
) -> None:
    values = two_groups(seed, small, large, distance)
    np.testing.assert_allclose(small_component(values), small_posterior(values), atol=1e-6)


@pytest.mark.parametrize("seed", range(6))
def test_the_component_with_the_smaller_mean_may_be_the_one_that_started_with_the_larger(seed: int) -> None:
    """A narrow group in the middle of a wide one: their means end up in either order."""
    draws = np.random.default_rng(seed)
    values = rescaled(np.concatenate([draws.normal(0.5, 0.01, 38), draws.random(38)]))
    np.testing.assert_allclose(small_component(values), small_posterior(values), atol=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_separate_groups_are_fitted_to_convergence(seed: int) -> None:
    values = two_groups(seed, 300, 200, 6.0)
    converged = small_posterior(values, tolerance=1e-12, iterations=10_000)
    np.testing.assert_allclose(small_component(values), converged, atol=0.01)


def test_the_small_losses_are_those_of_the_first_group() -> None:
    draws = np.random.default_rng(0)
    values = scaled(np.concatenate([draws.normal(1, 0.2, 400), draws.normal(4, 0.5, 200)]))
    found = small_component(values) > 0.5
    assert found[:400].mean() > 0.99
    assert found[400:].mean() < 0.01


@given(losses, st.randoms(use_true_random=False))
def test_the_order_of_the_samples_does_not_matter(values: list[float], random: Random) -> None:
    order = list(range(len(values)))
    random.shuffle(order)
    x = scaled(np.array(values))
    np.testing.assert_allclose(small_component(x[order]), small_component(x)[order], atol=1e-4)


@given(losses, st.lists(st.sampled_from([np.nan, np.inf, -np.inf]), max_size=5))
def test_probabilities_lie_in_the_unit_interval_and_are_nan_where_the_loss_is_not_finite(
    values: list[float], unknown: list[float]
) -> None:
    x = scaled(np.array([*unknown, *values]))
    found = small_component(x)
    assert np.isnan(found[: len(unknown)]).all()
    rest = found[len(unknown) :]
    assert ((rest >= 0) & (rest <= 1)).all()
    np.testing.assert_array_equal(rest, small_component(scaled(np.array(values))), "as if they were not there")


@given(losses)
def test_the_same_losses_always_give_the_same_bits(values: list[float]) -> None:
    x = scaled(np.array(values))
    assert small_component(x).tobytes() == small_component(x.copy()).tobytes()


@given(losses, st.floats(0.1, 10), st.floats(-5, 5))
def test_scaled_losses_lie_in_the_unit_interval(values: list[float], factor: float, shift: float) -> None:
    x = scaled(factor * np.array(values) + shift)
    assert x.min() == 0
    assert x.max() in (0, 1)
    assert ((x >= 0) & (x <= 1)).all()


def test_equal_losses_are_all_small() -> None:
    for count in (1, 2, 9):
        x = scaled(np.full(count, 1.7))
        assert x.tolist() == [0] * count
        assert small_component(x).tolist() == [1] * count
    assert np.isnan(scaled(np.array([2.0, np.nan]))[1])


def test_without_a_finite_loss_nothing_is_known() -> None:
    for values in (np.array([]), np.array([np.nan, np.nan])):
        assert np.isnan(small_component(scaled(values))).all()


@pytest.mark.parametrize("counts", [(1, 1), (1, 9), (9, 1), (50, 50), (99, 1), (1, 99)])
def test_two_values_are_the_two_components(counts: tuple[int, int]) -> None:
    """Also if the quartiles are equal, because one of the values is rare."""
    x = np.repeat([0.0, 1.0], counts)
    found = small_component(x)
    np.testing.assert_allclose(found, 1 - x, atol=1e-6)
    np.testing.assert_allclose(found, small_posterior(x), atol=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_equal_quartiles_start_at_the_extremes(seed: int) -> None:
    draws = np.random.default_rng(seed)
    x = rescaled(np.concatenate([np.full(90, 0.2), 0.2 + draws.random(10)]))
    np.testing.assert_allclose(small_component(x), small_posterior(x), atol=1e-6)
    assert (small_component(x)[:90] > 0.5).all()
