"""Gradient descent on h(theta, u, v) = 1/2 |J theta + u*u - v*v - y|^2 from theta = 0, u = v = gamma, with the rates
tau for theta and alpha tau for u and v. Many values of alpha go down side by side.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .problem import Array, Problem, check_positive

# The step is as long as two limits allow. Half of what a quadratic with the largest curvature at hand would bear; and u
# and v may change by this share at most, for a step of the descent to be close to the flow over the same time.
_CURVATURE, LARGEST_CHANGE = 0.5, 0.001
TOLERANCE = 1e-5  # of the residual; what is left then is less than what the length of the steps costs
_SMALLEST = 1e-300  # a residual that is exactly 0 puts no limit
_LOOK_EVERY = 50  # steps between looks whether some have converged


@dataclass(frozen=True)
class Descent:
    """Where the descent came to rest, for each alpha."""

    c: Array  # (A, r)
    s: Array  # (A, N): u*u - v*v
    residual: Array  # (A,): largest |J theta + s - y| as a share of the largest |y|
    steps: np.ndarray  # (A,) integers
    converged: np.ndarray  # (A,) whether the residual came below the tolerance


def descend(
    problem: Problem,
    alphas: Array,
    gamma: float,
    *,
    tolerance: float = TOLERANCE,
    largest_change: float = LARGEST_CHANGE,
    most_steps: int = 5_000_000,
) -> Descent:
    """Go down from gamma with each alpha until the residual is at most `tolerance` of the largest |y|, or time is up.

    Time runs out only next to an alpha at which an entry of s turns from zero to not zero.
    """
    check_positive("gamma", gamma)
    check_positive("the smallest alpha", float(alphas.min()))
    basis, y = problem.basis, problem.y  # (N, r), (N,)
    basis_t = np.ascontiguousarray(basis.T)
    scale, curvature = float(np.abs(y).max()), float(problem.sigma[0] ** 2)
    count, samples = len(alphas), problem.samples
    end = Descent(
        np.zeros((count, problem.rank)), np.zeros((count, samples)), np.zeros(count),
        np.zeros(count, dtype=np.int64), np.zeros(count, dtype=bool),
    )  # fmt: skip

    live = np.arange(count)  # which alphas are still on their way: the arrays below have a row for each of them
    alpha = alphas[:, None]  # (L, 1)
    c = np.zeros((count, problem.rank))
    u = np.full((count, samples), gamma)
    v = u.copy()
    for step in range(most_steps + 1):
        squares_u, squares_v = u * u, v * v
        residual = c @ basis_t + squares_u - squares_v - y  # (L, N)
        largest = np.abs(residual).max(axis=1, keepdims=True)  # (L, 1)
        if step % _LOOK_EVERY == 0 or step == most_steps:
            small = largest[:, 0] <= tolerance * scale
            done = small | (step == most_steps)
            if done.any():
                rows = live[done]
                end.c[rows], end.s[rows] = c[done], (squares_u - squares_v)[done]
                end.residual[rows], end.steps[rows], end.converged[rows] = largest[done, 0] / scale, step, small[done]
                on = ~done
                live, alpha, c, u, v = live[on], alpha[on], c[on], u[on], v[on]
                residual, largest, squares_u, squares_v = residual[on], largest[on], squares_u[on], squares_v[on]
                if not len(live):
                    break
        steepest = curvature + 4 * alpha * (squares_u + squares_v).max(axis=1, keepdims=True)
        tau = np.minimum(_CURVATURE / steepest, largest_change / (2 * alpha * np.maximum(largest, _SMALLEST)))  # (L, 1)
        c -= tau * (residual @ basis)
        change = 2 * alpha * tau * residual
        u -= u * change
        v += v * change
    return end
