"""Critical points of h(theta, u, v) = 1/2 |J theta + u*u - v*v - y|^2: constructed ones, and ones found by search.

At a critical point J' r = 0, r*u = 0 and r*v = 0, where r is the residual. Where u_i or v_i is not 0, r_i is 0. So a
critical point with a residual has entries with u_i = v_i = 0, and the curvature there along v_i or u_i is -2 |r_i|: it
is a saddle with a descent direction.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares

from .problem import Array, Problem

MAX_GRADIENT = 1e-9  # largest gradient entry of a point that counts as critical


@dataclass(frozen=True)
class Point:
    """A point of the landscape: theta (p,), u (N,), v (N,)."""

    theta: Array
    u: Array
    v: Array

    @classmethod
    def from_vector(cls, vector: Array, samples: int) -> Point:
        """Split a vector of shape (p + 2 N,)."""
        parameters = len(vector) - 2 * samples
        return cls(vector[:parameters], vector[parameters : parameters + samples], vector[parameters + samples :])


def residual(problem: Problem, point: Point) -> Array:
    """(N,): J theta + u*u - v*v - y."""
    return np.asarray(problem.jacobian @ point.theta + point.u**2 - point.v**2 - problem.y)


def gradient(problem: Problem, point: Point) -> Array:
    """(p + 2 N,): the gradient of h."""
    r = residual(problem, point)
    return np.concatenate([problem.jacobian.T @ r, 2 * r * point.u, -2 * r * point.v])


def hessian(problem: Problem, point: Point) -> Array:
    """(p + 2 N, p + 2 N): D'D + diag(0, 2r, -2r), where D = [J, 2 diag(u), -2 diag(v)] is the derivative of r."""
    r = residual(problem, point)
    derivative = np.hstack([problem.jacobian, 2 * np.diag(point.u), -2 * np.diag(point.v)])
    curvature = np.concatenate([np.zeros_like(point.theta), 2 * r, -2 * r])
    return np.asarray(derivative.T @ derivative + np.diag(curvature))


def construct_critical_point(problem: Problem, zeros: int, generator: np.random.Generator) -> Point:
    """Construct a critical point with u_i = v_i = 0 at `zeros` random indices.

    At these indices theta is a least-squares fit; elsewhere u and v fit the rest. All remaining freedom (theta in the
    null space, u and v with the same difference of squares) is random.
    """
    samples, jacobian = problem.samples, problem.jacobian
    at = np.sort(generator.permutation(samples)[:zeros])
    theta = np.asarray(generator.standard_normal(jacobian.shape[1]))
    # Project onto the least-squares solutions of the rows in `at`; without such rows, any theta will do.
    theta = theta + np.linalg.pinv(jacobian[at], rcond=1e-10) @ (problem.y[at] - jacobian[at] @ theta)
    rest = problem.y - jacobian @ theta
    shift = generator.exponential(size=samples)  # added to both u*u and v*v
    u, v = np.sqrt(np.maximum(rest, 0) + shift), np.sqrt(np.maximum(-rest, 0) + shift)
    u[at] = v[at] = 0
    signs = generator.choice([-1.0, 1.0], size=(2, samples))
    return Point(theta, signs[0] * u, signs[1] * v)


def find_critical_point(problem: Problem, generator: np.random.Generator) -> Point | None:
    """Minimise |gradient|^2 from a random start; None if the search does not converge to a critical point."""
    samples, parameters = problem.jacobian.shape
    start = generator.standard_normal(parameters + 2 * samples) * generator.choice([0.1, 0.5, 1.0, 2.0])
    found = least_squares(
        lambda vector: gradient(problem, Point.from_vector(vector, samples)),
        start,
        jac=lambda vector: hessian(problem, Point.from_vector(vector, samples)),
        method="trf", xtol=1e-15, ftol=1e-15, gtol=1e-15, max_nfev=500,
    )  # fmt: skip
    point = Point.from_vector(found.x, samples)
    return point if np.abs(gradient(problem, point)).max() <= MAX_GRADIENT else None
