"""The descent in the limit of infinitesimal steps, in closed form up to one integral:

    theta = J' nu,   u = gamma exp(2 alpha nu),   v = gamma exp(-2 alpha nu),   d nu / dt = -r = y - J theta - u*u + v*v

So nu (N numbers) follows an ordinary differential equation, which is solved to a tolerance. It is the gradient flow of

    F(nu) = 1/2 |J' nu|^2 - y' nu + gamma^2 / (2 alpha) sum cosh(4 alpha nu)

which explains the implicit bias. Without the last term, F is what the dual of the convex program minimises in the box
|nu| <= lambda. The last term is a soft wall of that box: with alpha = -log(gamma) / (2 lambda) its slope
2 gamma^2 sinh(4 alpha nu) is almost 0 inside and reaches 1 at |nu| = lambda. The smaller gamma, the harder the wall.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.integrate import solve_ivp

from .problem import Array, Problem, ProblemError, check_positive

_END_TIME = 1e15  # every flow has converged by then
_MAX_EXPONENT = 700.0  # of float64; only steps that the integrator tries and rejects reach it


@dataclass(frozen=True)
class Limit:
    """The limit of the flow."""

    c: Array  # (r,)
    s: Array  # (N,)
    nu: Array  # (N,)
    residual: float  # as in `Descent`


def alpha_for(weight: float, gamma: float) -> float:
    """The alpha for which descent from gamma solves the convex program with `weight`, the paper's lambda."""
    check_positive("lambda", weight)
    check_positive("gamma", gamma)
    if gamma >= 1:
        raise ProblemError(f"gamma = {gamma:g}: must be below 1, because alpha must be above 0")
    return -math.log(gamma) / (2 * weight)


def weights_for(alphas: Array, gamma: float) -> Array:
    """The inverse of `alpha_for`: the lambdas of these alphas."""
    return np.asarray(-math.log(gamma) / (2 * alphas))


def integrate_flow(problem: Problem, alpha: float, gamma: float, *, tolerance: float = 1e-7) -> Limit:
    """Integrate until the residual is at most `tolerance` times the largest |y|."""
    check_positive("alpha", alpha)
    check_positive("gamma", gamma)
    basis, y = problem.basis, problem.y
    gram = basis @ basis.T  # (N, N)
    scale = float(np.abs(y).max())

    def exponent(nu: Array) -> Array:
        return np.clip(4 * alpha * nu, -_MAX_EXPONENT, _MAX_EXPONENT)

    def noise(nu: Array) -> Array:
        return np.asarray(2 * gamma**2 * np.sinh(exponent(nu)))

    def slope(_: float, nu: Array) -> Array:
        return np.asarray(y - gram @ nu - noise(nu))

    def derivative(_: float, nu: Array) -> Array:
        return np.asarray(-gram - np.diag(8 * alpha * gamma**2 * np.cosh(exponent(nu))))

    def distance(time: float, nu: Array) -> float:
        return float(np.abs(slope(time, nu)).max()) - tolerance * scale

    distance.terminal = True  # type: ignore[attr-defined]
    path = solve_ivp(
        slope, (0, _END_TIME), np.zeros_like(y), method="LSODA", jac=derivative,
        rtol=1e-8, atol=1e-9 / alpha, events=distance,
    )  # fmt: skip
    nu = path.y[:, -1]
    residual = float(np.abs(slope(0, nu)).max()) / scale
    if not residual <= 2 * tolerance:  # also true for NaN
        raise ProblemError(f"the flow with alpha = {alpha:g}, gamma = {gamma:g} did not converge: {path.message}")
    return Limit(basis.T @ nu, noise(nu), nu, residual)
