"""Descent, its flow and the convex program, on the curve alpha = -log(gamma) / (2 lambda)."""

import itertools
import math

import numpy as np
import pytest
from scipy.optimize import minimize

from sopdist.theory.convex import ConvexProgram
from sopdist.theory.descent import descend
from sopdist.theory.gradient_flow import alpha_for, integrate_flow
from sopdist.theory.problem import Array, Problem, ProblemError, random_problem, relative_difference, relative_error

GAMMA = math.exp(-8)
SHAPE = (20, 40, 3, 3)


@pytest.fixture(scope="module", params=[0, 1])
def problem(request: pytest.FixtureRequest) -> Problem:
    return random_problem(*SHAPE, np.random.default_rng(request.param))


def differences(one: object, other: object) -> tuple[float, float]:
    return relative_difference(one.c, other.c), relative_difference(one.s, other.s)  # type: ignore[attr-defined]


@pytest.mark.parametrize("weight", [0.05, 0.2, 1.0])
def test_all_three_agree_where_the_ground_truth_is_recovered(problem: Problem, weight: float) -> None:
    program = ConvexProgram(20, 3).solve(problem, weight)
    assert relative_error(program.c, problem.c) < 1e-3
    alpha = alpha_for(weight, GAMMA)
    flow = integrate_flow(problem, alpha, GAMMA)
    descent = descend(problem, np.array([alpha]), GAMMA)
    assert descent.converged.all()
    assert max(differences(flow, program)) < 1e-2
    for c, s in ((program.c, program.s), (flow.c, flow.s)):
        assert relative_difference(descent.c[0], c) < 1e-2
        assert relative_difference(descent.s[0], s) < 1e-2


@pytest.mark.parametrize("weight", [0.001, 0.003])
def test_descent_follows_its_flow_where_the_ground_truth_is_not_recovered(problem: Problem, weight: float) -> None:
    alpha = alpha_for(weight, GAMMA)
    flow = integrate_flow(problem, alpha, GAMMA)
    descent = descend(problem, np.array([alpha]), GAMMA)
    assert relative_difference(descent.c[0], flow.c) < 1e-2
    assert relative_difference(descent.s[0], flow.s) < 1e-2


@pytest.mark.parametrize("weight", [0.001, 0.002, 0.05, 0.2])
def test_flow_and_program_agree_better_as_gamma_shrinks(problem: Problem, weight: float) -> None:
    program = ConvexProgram(20, 3).solve(problem, weight)
    gammas = [math.exp(-4), math.exp(-8), math.exp(-16)]
    flows = [integrate_flow(problem, alpha_for(weight, gamma), gamma, tolerance=1e-9) for gamma in gammas]
    gaps = [differences(flow, program) for flow in flows]
    for first, second in itertools.pairwise(gaps):
        assert second[0] < first[0]
        assert second[1] < first[1]
    if relative_error(program.c, problem.c) > 0.1:  # far from recovery, the gap decreases like 1 / |log gamma|
        assert gaps[2][0] == pytest.approx(gaps[1][0] / 2, rel=0.15)
    else:
        assert gaps[2][0] < 1e-5


@pytest.mark.parametrize("alpha", [4.0, 40.0, 400.0, 4000.0])
def test_the_flow_converges_to_the_minimum_of_its_potential(problem: Problem, alpha: float) -> None:
    """F(nu) = 1/2 |B' nu|^2 - y' nu + gamma^2 / (2 alpha) sum cosh(4 alpha nu), minimised in x = 4 alpha nu."""
    gram = problem.basis @ problem.basis.T

    def potential(x: Array) -> float:
        nu = x / (4 * alpha)
        return float(nu @ gram @ nu / 2 - problem.y @ nu + GAMMA**2 / (2 * alpha) * np.cosh(x).sum()) * alpha

    def slope(x: Array) -> Array:
        return np.asarray(gram @ x / (4 * alpha) - problem.y + 2 * GAMMA**2 * np.sinh(x)) / 4

    def curvature(x: Array) -> Array:
        return np.asarray(gram / (4 * alpha) + np.diag(2 * GAMMA**2 * np.cosh(x))) / 4

    best = minimize(
        potential,
        np.zeros(20),
        jac=slope,
        hess=curvature,
        method="trust-exact",
        options={"gtol": 1e-9, "maxiter": 5000},
    )
    flow = integrate_flow(problem, alpha, GAMMA)
    assert np.abs(slope(best.x)).max() < 1e-6
    assert relative_difference(flow.c, problem.basis.T @ best.x / (4 * alpha)) < 1e-4


def test_the_descent_matches_plain_gradient_descent() -> None:
    """In all p coordinates of theta, with a fixed step. That step is a little too long, hence the loose tolerances."""
    problem = random_problem(8, 12, 2, 1, np.random.default_rng(3))
    alpha, gamma, tau = 20.0, math.exp(-2), 1e-4
    jacobian, theta = problem.jacobian, np.zeros(12)
    u, v = np.full(8, gamma), np.full(8, gamma)
    for _ in range(150_000):
        r = jacobian @ theta + u * u - v * v - problem.y
        theta, u, v = theta - tau * jacobian.T @ r, u - 2 * alpha * tau * u * r, v + 2 * alpha * tau * v * r
    assert np.abs(r).max() < 1e-4
    found = descend(problem, np.array([alpha]), gamma)
    assert relative_difference(problem.v @ found.c[0], theta) < 2e-3
    assert relative_difference(found.s[0], u * u - v * v) < 2e-2


def test_shorter_steps_come_closer_to_the_flow(problem: Problem) -> None:
    alpha = alpha_for(0.002, GAMMA)
    flow = integrate_flow(problem, alpha, GAMMA)
    gaps = [
        relative_difference(descend(problem, np.array([alpha]), GAMMA, max_change=change).c[0], flow.c)
        for change in (0.04, 0.02, 0.01)
    ]
    assert gaps[2] == pytest.approx(gaps[1] / 2, rel=0.2)
    assert gaps[1] == pytest.approx(gaps[0] / 2, rel=0.2)


def test_alphas_that_run_in_parallel_are_independent(problem: Problem) -> None:
    alphas = np.array([8.0, 60.0, 2000.0])
    parallel = descend(problem, alphas, GAMMA)
    for row, alpha in enumerate(alphas):
        alone = descend(problem, np.array([alpha]), GAMMA)
        np.testing.assert_allclose(parallel.c[row], alone.c[0], rtol=1e-6)
        assert parallel.steps[row] == alone.steps[0]


def test_a_descent_that_reaches_the_step_limit_has_not_converged(problem: Problem) -> None:
    cut = descend(problem, np.array([4.0, 4000.0]), GAMMA, max_steps=120)
    assert not cut.converged.any()
    assert cut.steps.tolist() == [120, 120]
    assert (cut.residual > 1e-6).all()


def test_invalid_rates_are_reported(problem: Problem) -> None:
    for call, message in (
        (lambda: alpha_for(0.0, GAMMA), "lambda = 0"),
        (lambda: alpha_for(1.0, 1.0), "gamma = 1: must be below 1"),
        (lambda: alpha_for(1.0, -1.0), "gamma = -1"),
        (lambda: integrate_flow(problem, 0.0, GAMMA), "alpha = 0"),
        (lambda: descend(problem, np.array([1.0, -2.0]), GAMMA), "smallest alpha = -2"),
        (lambda: descend(problem, np.array([1.0]), 0.0), "gamma = 0"),
    ):
        with pytest.raises(ProblemError, match=message):
            call()
