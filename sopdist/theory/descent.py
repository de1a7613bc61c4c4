"""Gradient descent on h(theta, u, v) = 1/2 |J theta + u*u - v*v - y|^2 from theta = 0, u = v = gamma, with learning
rate tau for theta and alpha tau for u and v. Many values of alpha run in parallel.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .problem import Array, Problem, check_positive

# Two limits set the length of a step: half of the largest stable step for the current curvature, and the largest
# relative change of u and v, which keeps the descent close to the flow.
_CURVATURE, MAX_CHANGE = 0.5, 0.001
TOLERANCE = 1e-5  # of the residual; the error that remains is smaller than that of the step length
_MIN_RESIDUAL = 1e-300  # avoids a division by 0; a residual of exactly 0 does not limit the step
_CHECK_EVERY = 50  # steps between checks for convergence


@dataclass(frozen=True)
class Descent:
    """The end of the descent for each alpha."""

    c: Array  # (A, r)
    s: Array  # (A, N): u*u - v*v
    residual: Array  # (A,): largest |J theta + s - y| relative to the largest |y|
    steps: np.ndarray  # (A,) integers
    converged: np.ndarray  # (A,) whether the residual is within the tolerance


def descend(
    problem: Problem,
    alphas: Array,
    gamma: float,
    *,
    tolerance: float = TOLERANCE,
    max_change: float = MAX_CHANGE,
    max_steps: int = 5_000_000,
) -> Descent:
    """For each alpha, descend until the residual is at most `tolerance` times the largest |y|, or for `max_steps`.

    The limit on the steps is reached only close to an alpha at which an entry of s changes from zero to nonzero.
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

    active = np.arange(count)  # (L,) alphas that have not converged; the arrays below have one row for each
    alpha = alphas[:, None]  # (L, 1)
    c = np.zeros((count, problem.rank))
    u = np.full((count, samples), gamma)
    v = u.copy()
    for step in range(max_steps + 1):
        squares_u, squares_v = u * u, v * v
        residual = c @ basis_t + squares_u - squares_v - y  # (L, N)
        largest = np.abs(residual).max(axis=1, keepdims=True)  # (L, 1)
        if step % _CHECK_EVERY == 0 or step == max_steps:
            converged = largest[:, 0] <= tolerance * scale
            done = converged | (step == max_steps)
            if done.any():
                rows = active[done]
                end.c[rows], end.s[rows] = c[done], (squares_u - squares_v)[done]
                end.residual[rows] = largest[done, 0] / scale
                end.steps[rows], end.converged[rows] = step, converged[done]
                on = ~done
                active, alpha, c, u, v = active[on], alpha[on], c[on], u[on], v[on]
                residual, largest, squares_u, squares_v = residual[on], largest[on], squares_u[on], squares_v[on]
                if not len(active):
                    break
        steepest = curvature + 4 * alpha * (squares_u + squares_v).max(axis=1, keepdims=True)
        tau = np.minimum(_CURVATURE / steepest, max_change / (2 * alpha * np.maximum(largest, _MIN_RESIDUAL)))  # (L, 1)
        c -= tau * (residual @ basis)
        change = 2 * alpha * tau * residual
        u -= u * change
        v += v * change
    return end
