"""The convex program: optimality conditions, brute force in one dimension, and invalid input."""

from dataclasses import replace

import cvxpy
import numpy as np
import pytest
from scipy.optimize import minimize_scalar

from sopdist.theory.convex import ConvexProgram
from sopdist.theory.problem import Problem, ProblemError, random_problem

SHAPES = [(20, 40, 3, 3), (30, 20, 10, 5), (25, 30, 25, 25), (100, 150, 20, 20)]
WEIGHTS = (1e-4, 1e-3, 1e-2, 0.1, 1.0)


def make_random(shape: tuple[int, int, int, int], seed: int = 0) -> Problem:
    return random_problem(*shape, np.random.default_rng(seed))


@pytest.mark.parametrize("shape", SHAPES)
def test_solutions_satisfy_the_optimality_conditions(shape: tuple[int, int, int, int]) -> None:
    problem, program = make_random(shape), ConvexProgram(shape[0], shape[2])
    for weight in WEIGHTS:
        found = program.solve(problem, weight)
        theta, scale = problem.v @ found.c, np.abs(problem.y).max()
        np.testing.assert_allclose(problem.jacobian @ theta + found.s, problem.y, atol=1e-6 * scale)
        np.testing.assert_allclose(problem.jacobian.T @ found.nu, theta, atol=1e-5 * np.abs(theta).max())
        assert np.abs(found.nu).max() <= weight * (1 + 1e-6)
        large = np.abs(found.s) > 1e-4 * scale
        np.testing.assert_allclose(found.nu[large], weight * np.sign(found.s[large]), rtol=1e-3)
        assert found.kkt_gap(problem, weight) < 1e-6


@pytest.mark.parametrize("shape", SHAPES[:3])
def test_the_reduced_program_has_the_solution_of_the_original_one(shape: tuple[int, int, int, int]) -> None:
    problem, program = make_random(shape, 1), ConvexProgram(shape[0], shape[2])
    for weight in (1e-2, 0.3):
        theta, s = cvxpy.Variable(shape[1]), cvxpy.Variable(shape[0])
        cost = cvxpy.sum_squares(theta) / 2 + weight * cvxpy.norm1(s)
        original = cvxpy.Problem(cvxpy.Minimize(cost), [problem.y == problem.jacobian @ theta + s])
        original.solve(solver=cvxpy.SCS, eps_abs=1e-10, eps_rel=1e-10, max_iters=200_000)
        found = program.solve(problem, weight)
        np.testing.assert_allclose(problem.v @ found.c, theta.value, atol=1e-5)
        np.testing.assert_allclose(found.s, s.value, atol=1e-4)


@pytest.mark.parametrize("weight", [0.01, 0.2, 3.0])
def test_one_dimension_by_brute_force(weight: float) -> None:
    problem = make_random((15, 4, 1, 4), 2)
    column = problem.basis[:, 0]
    best = minimize_scalar(
        lambda c: c**2 / 2 + weight * np.abs(problem.y - column * c).sum(), bounds=(-10, 10), options={"xatol": 1e-10}
    )
    assert ConvexProgram(15, 1).solve(problem, weight).c[0] == pytest.approx(best.x, abs=1e-5)


def test_one_program_solves_many_problems() -> None:
    program = ConvexProgram(20, 3)
    shape = SHAPES[0]
    cases = [(make_random(shape, seed), weight) for seed in (3, 4) for weight in (0.01, 0.1)]
    reused = [program.solve(problem, weight).c for problem, weight in cases]
    separate = [ConvexProgram(20, 3).solve(problem, weight).c for problem, weight in cases]
    np.testing.assert_allclose(reused, separate, atol=1e-9)


def test_a_point_that_is_not_optimal_has_a_gap() -> None:
    problem, weight = make_random(SHAPES[0]), 0.01
    found = ConvexProgram(20, 3).solve(problem, weight)
    assert found.kkt_gap(problem, weight) < 1e-6
    moved = found.s + 0.1 * np.abs(found.s).max()
    wrong = [
        replace(found, s=moved),
        replace(found, c=found.c * 1.1),
        replace(found, nu=found.nu * 1.1),
        replace(found, c=found.c * 0, nu=found.nu * 0, s=problem.y),
    ]
    assert min(point.kkt_gap(problem, weight) for point in wrong) > 1e-2


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_lambda_must_be_above_zero(weight: float) -> None:
    with pytest.raises(ProblemError, match=r"lambda = .*: must be a finite number above 0"):
        ConvexProgram(20, 3).solve(make_random(SHAPES[0]), weight)


def test_a_program_for_other_sizes_is_refused() -> None:
    with pytest.raises(ProblemError, match=r"N x r = \(20, 3\) for a program of \(20, 4\)"):
        ConvexProgram(20, 4).solve(make_random(SHAPES[0]), 1.0)
