"""Random problems of the theory: sizes, coherence, rank, and the guarantee of recovery."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sopdist.theory.convex import ConvexProgram
from sopdist.theory.problem import (
    ProblemError,
    coherence,
    compact_svd,
    guarantee,
    make_problem,
    random_problem,
    relative_difference,
    relative_error,
)


@st.composite
def sizes(draw: st.DrawFn) -> tuple[int, int, int, int]:
    samples, parameters = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    return samples, parameters, draw(st.integers(1, min(samples, parameters))), draw(st.integers(0, samples))


@given(sizes(), st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_a_random_problem_has_the_requested_sizes(shape: tuple[int, int, int, int], seed: int) -> None:
    samples, parameters, rank, wrong = shape
    problem = random_problem(*shape, np.random.default_rng(seed))
    assert (problem.samples, problem.rank, problem.wrong) == (samples, rank, wrong)
    jacobian, theta = problem.jacobian, problem.v @ problem.c
    assert jacobian.shape == (samples, parameters)
    assert np.linalg.matrix_rank(jacobian) == rank
    np.testing.assert_allclose(jacobian @ theta + problem.s, problem.y, atol=1e-9)
    # NumPy's least squares also returns the solution with the smallest norm
    shortest = np.linalg.lstsq(jacobian, problem.y - problem.s, rcond=1e-10)[0]
    np.testing.assert_allclose(theta, shortest, atol=1e-6)


@given(sizes(), st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_coherence_is_the_largest_diagonal_entry_of_the_projection(shape: tuple[int, int, int, int], seed: int) -> None:
    problem = random_problem(*shape, np.random.default_rng(seed))
    projection = problem.jacobian @ np.linalg.pinv(problem.jacobian, rcond=1e-10)  # U U'
    mu = coherence(problem.u)
    assert mu == pytest.approx(problem.samples / problem.rank * projection.diagonal().max(), rel=1e-6)
    assert 1 - 1e-9 <= mu <= problem.samples / problem.rank + 1e-9


def test_coherence_of_known_matrices() -> None:
    assert coherence(compact_svd(np.ones((8, 3)))[0]) == pytest.approx(1)  # all observations have the same weight
    single = np.zeros((8, 3))
    single[5, 1] = 2.0
    assert coherence(compact_svd(single)[0]) == pytest.approx(8)


def test_the_rank_of_a_matrix_is_detected() -> None:
    generator = np.random.default_rng(0)
    matrix = generator.standard_normal((9, 2)) @ generator.standard_normal((2, 7))
    u, sigma, v = compact_svd(matrix)
    assert sigma.shape == (2,)
    np.testing.assert_allclose((u * sigma) @ v.T, matrix, atol=1e-12)
    with pytest.raises(ProblemError, match="J is zero"):
        compact_svd(np.zeros((3, 4)))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((10, 20, 3, 11), "k = 11: must be from 0 to N = 10, the number of observations"),
        ((10, 20, 3, -1), "k = -1"),
        ((10, 20, 11, 3), "r = 11: a matrix of N x p = 10 x 20 has at most rank 10"),
        ((20, 10, 11, 3), "r = 11"),
        ((10, 20, 0, 3), "r = 0: must be at least 1"),
        ((0, 20, 3, 0), "N = 0"),
    ],
)
def test_invalid_sizes_are_reported(shape: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        random_problem(*shape, np.random.default_rng(0))


def test_the_same_generator_gives_the_same_problem() -> None:
    one, other = (random_problem(10, 20, 3, 2, np.random.default_rng(7)) for _ in range(2))
    assert np.array_equal(one.y, other.y)
    assert not np.array_equal(one.y, random_problem(10, 20, 3, 2, np.random.default_rng(8)).y)


def test_every_problem_that_the_proof_covers_is_recovered() -> None:
    covered = 0
    for seed in range(60):
        rank, wrong = 1 + seed % 3, 1 + seed // 3 % 2
        problem = random_problem(300, 60, rank, wrong, np.random.default_rng(seed))
        promise = guarantee(problem)
        inside = wrong**2 * rank < 300 / (4 * promise.coherence)
        assert promise.holds == inside == math.isfinite(promise.threshold)
        if not inside:
            continue
        covered += 1
        # rho of the null space property
        rho = math.sqrt(wrong**2 * rank * promise.coherence / 300)
        rho /= 1 - rho
        pull = np.abs(np.linalg.pinv(problem.jacobian.T, rcond=1e-10) @ (problem.v @ problem.c)).max()
        assert promise.threshold == pytest.approx(2 * (1 + rho) / (1 - rho) * pull, rel=1e-6)
        found = ConvexProgram(300, rank).solve(problem, 1.01 * promise.threshold)
        assert relative_error(found.c, problem.c) < 1e-3
        assert relative_error(found.s, problem.s) < 1e-3
    assert covered >= 30


def test_relative_errors_and_differences_of_zero() -> None:
    zero, three = np.zeros(2), np.array([3.0, 0.0])
    assert (relative_error(three, zero), relative_error(zero, three)) == (3.0, 1.0)
    assert (relative_difference(zero, zero), relative_difference(zero, three)) == (0.0, 1.0)


def test_a_problem_without_wrong_observations() -> None:
    problem = make_problem(np.eye(4)[:, :2], np.array([1.0, 2.0]), np.zeros(4))
    assert problem.wrong == 0
    assert guarantee(problem).holds
