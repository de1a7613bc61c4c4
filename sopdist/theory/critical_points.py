"""Critical points of h(theta, u, v) = 1/2 |J theta + u*u - v*v - y|^2, made to order and found by search.

At a critical point J' r = 0, r*u = 0 and r*v = 0, with r the residual. Where u_i or v_i is not 0, r_i is; so a point
with a residual has places with u_i = v_i = 0, and there the curvature along v_i or u_i is -2 |r_i|: down is open.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares

from .problem import Array, Problem

SMALLEST_GRADIENT = 1e-9  # what counts as no gradient


@dataclass(frozen=True)
class Point:
    """A place of the landscape: theta (p,), u (N,), v (N,)."""

    theta: Array
    u: Array
    v: Array

    @classmethod
    def from_vector(cls, vector: Array, samples: int) -> Point:
        """Of (p + 2 N,) numbers."""
        parameters = len(vector) - 2 * samples
        return cls(vector[:parameters], vector[parameters : parameters + samples], vector[parameters + samples :])


def residual(problem: Problem, point: Point) -> Array:
    """(N,): J theta + u*u - v*v - y."""
    return np.asarray(problem.jacobian @ point.theta + point.u**2 - point.v**2 - problem.y)


def gradient(problem: Problem, point: Point) -> Array:
    """(p + 2 N,)."""
    r = residual(problem, point)
    return np.concatenate([problem.jacobian.T @ r, 2 * r * point.u, -2 * r * point.v])


def hessian(problem: Problem, point: Point) -> Array:
    """(p + 2 N, p + 2 N): with D = [J, 2 diag(u), -2 diag(v)], the derivative of r, it is D'D + diag(0, 2r, -2r)."""
    r = residual(problem, point)
    derivative = np.hstack([problem.jacobian, 2 * np.diag(point.u), -2 * np.diag(point.v)])
    bending = np.concatenate([np.zeros_like(point.theta), 2 * r, -2 * r])
    return np.asarray(derivative.T @ derivative + np.diag(bending))


def make_critical_point(problem: Problem, unexplained: int, generator: np.random.Generator) -> Point:
    """One with u_i = v_i = 0 in so many random places: there theta fits as well as it can, elsewhere u and v fit the
    rest. Everything that is free then (theta where J does not see it, u and v of the same difference) is random."""
    samples, jacobian = problem.samples, problem.jacobian
    at = np.sort(generator.permutation(samples)[:unexplained])
    theta = np.asarray(generator.standard_normal(jacobian.shape[1]))
    # Project onto the least-squares solutions of the rows in `at`; with no such rows, any theta will do.
    theta = theta + np.linalg.pinv(jacobian[at], rcond=1e-10) @ (problem.y[at] - jacobian[at] @ theta)
    rest = problem.y - jacobian @ theta
    more = generator.exponential(size=samples)  # u*u and v*v may both be larger by the same
    u, v = np.sqrt(np.maximum(rest, 0) + more), np.sqrt(np.maximum(-rest, 0) + more)
    u[at] = v[at] = 0
    signs = generator.choice([-1.0, 1.0], size=(2, samples))
    return Point(theta, signs[0] * u, signs[1] * v)


def find_critical_point(problem: Problem, generator: np.random.Generator) -> Point | None:
    """Minimise |gradient|^2 from a random start; None where that ends in a place that is not critical."""
    samples, parameters = problem.jacobian.shape
    start = generator.standard_normal(parameters + 2 * samples) * generator.choice([0.1, 0.5, 1.0, 2.0])
    found = least_squares(
        lambda vector: gradient(problem, Point.from_vector(vector, samples)),
        start,
        jac=lambda vector: hessian(problem, Point.from_vector(vector, samples)),
        method="trf", xtol=1e-15, ftol=1e-15, gtol=1e-15, max_nfev=500,
    )  # fmt: skip
    point = Point.from_vector(found.x, samples)
    return point if np.abs(gradient(problem, point)).max() <= SMALLEST_GRADIENT else None
