"""Critical points: gradient and Hessian against autograd, and the curvature that the proof states."""

import numpy as np
import pytest
import torch

from sopdist.theory.critical_points import (
    Point,
    construct_critical_point,
    find_critical_point,
    gradient,
    hessian,
    residual,
)
from sopdist.theory.landscape import CriticalPoint, measure_point
from sopdist.theory.problem import Problem, random_problem

SAMPLES, PARAMETERS = 8, 12


@pytest.fixture
def problem() -> Problem:
    return random_problem(SAMPLES, PARAMETERS, 2, 2, np.random.default_rng(0))


def test_gradient_and_hessian_are_those_of_autograd(problem: Problem) -> None:
    vector = np.random.default_rng(1).standard_normal(PARAMETERS + 2 * SAMPLES)
    jacobian, y = torch.from_numpy(problem.jacobian), torch.from_numpy(problem.y)

    def h(x: torch.Tensor) -> torch.Tensor:
        theta, u, v = x.split([PARAMETERS, SAMPLES, SAMPLES])
        return ((jacobian @ theta + u * u - v * v - y) ** 2).sum() / 2

    at, point = torch.from_numpy(vector), Point.from_vector(vector, SAMPLES)
    np.testing.assert_allclose(gradient(problem, point), torch.func.grad(h)(at), atol=1e-9)
    np.testing.assert_allclose(hessian(problem, point), torch.func.hessian(h)(at), atol=1e-9)


@pytest.mark.parametrize("zeros", range(SAMPLES + 1))
def test_constructed_points_are_critical_with_the_curvature_of_the_proof(problem: Problem, zeros: int) -> None:
    for seed in range(5):
        point = construct_critical_point(problem, zeros, np.random.default_rng(seed))
        assert np.abs(gradient(problem, point)).max() < 1e-9
        left = np.abs(residual(problem, point)).max()
        smallest = np.linalg.eigvalsh(hessian(problem, point))[0]
        measured = measure_point(problem, "made", point)
        assert measured.unexplained == zeros
        if zeros <= problem.rank:  # theta alone can fit this many entries
            assert left < 1e-9
        if measured.kind == "minimum":
            assert smallest > -1e-6
        else:
            assert measured.kind == "strict saddle"
            assert smallest <= -2 * left + 1e-9


def test_a_point_where_u_and_v_are_zero_is_a_saddle(problem: Problem) -> None:
    point = construct_critical_point(problem, SAMPLES, np.random.default_rng(0))
    assert not point.u.any()
    assert not point.v.any()
    assert measure_point(problem, "made", point).kind == "strict saddle"


def test_points_found_by_search_are_critical(problem: Problem) -> None:
    found = [find_critical_point(problem, np.random.default_rng(seed)) for seed in range(6)]
    points = [measure_point(problem, "found", point) for point in found if point is not None]
    assert len(points) >= 4
    assert {point.kind for point in points} <= {"minimum", "strict saddle"}
    assert max(point.gradient for point in points) < 1e-9


def test_a_point_that_is_neither_is_detected() -> None:
    def kind(residual: float, eigenvalue: float) -> str:
        return CriticalPoint("made", 1, 0.0, residual, eigenvalue, -2 * residual).kind

    assert [kind(0.0, -1e-12), kind(0.1, -0.2), kind(0.1, 0.0)] == ["minimum", "strict saddle", "neither"]
