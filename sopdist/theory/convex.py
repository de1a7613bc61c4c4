"""The convex program that gradient descent solves implicitly:

    min 1/2 |theta|^2 + lambda |s|_1     subject to     y = J theta + s

It is set up once for a number of samples and a rank, then solved for any J, y and lambda (CVXPY, Clarabel). It uses the
coordinates c of `problem` and is divided by lambda, so that small lambdas are solved as accurately as large ones:

    min lambda/2 |c'|^2 + |s|_1          subject to     y = (lambda B) c' + s,     c = lambda c'
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import cvxpy
import numpy as np

from .problem import Array, Problem, ProblemError, check_positive


@dataclass(frozen=True)
class Optimum:
    """A solution with its certificate: nu is the multiplier of the constraint."""

    c: Array  # (r,)
    s: Array  # (N,)
    nu: Array  # (N,)

    def kkt_gap(self, problem: Problem, weight: float) -> float:
        """The largest violation of the optimality conditions, each relative to the size of its own terms.

        y = B c + s;  c = B' nu;  |nu| <= lambda;  nu = lambda sign(s) where s is not 0.
        """
        basis, scale = problem.basis, np.abs(problem.y).max() or 1.0
        feasible = np.abs(basis @ self.c + self.s - problem.y).max() / scale
        stationary = np.abs(basis.T @ self.nu - self.c).max() / (np.abs(self.c).max() or 1.0)
        inside = max(0.0, np.abs(self.nu).max() / weight - 1)
        total = np.abs(self.s).sum()
        aligned = abs(total - self.nu @ self.s / weight) / (np.abs(problem.y).sum() or 1.0)
        return float(max(feasible, stationary, inside, aligned))


class ConvexProgram:
    """The program for all problems with N samples and rank r."""

    def __init__(self, samples: int, rank: int) -> None:
        self._shape = (samples, rank)
        self._matrix = cvxpy.Parameter((samples, rank))  # lambda B
        self._y = cvxpy.Parameter(samples)
        self._weight = cvxpy.Parameter(nonneg=True)
        self._c, self._s = cvxpy.Variable(rank), cvxpy.Variable(samples)
        self._constraint = self._y == self._matrix @ self._c + self._s
        cost = self._weight / 2 * cvxpy.sum_squares(self._c) + cvxpy.norm1(self._s)
        self._program = cvxpy.Problem(cvxpy.Minimize(cost), [self._constraint])

    def solve(self, problem: Problem, weight: float) -> Optimum:
        """The optimum for `weight`, the paper's lambda."""
        check_positive("lambda", weight)
        if problem.basis.shape != self._shape:
            raise ProblemError(f"a problem of N x r = {problem.basis.shape} for a program of {self._shape}")
        self._matrix.value, self._y.value, self._weight.value = weight * problem.basis, problem.y, weight
        self._program.solve(solver=cvxpy.CLARABEL)
        if self._program.status != cvxpy.OPTIMAL or not math.isfinite(self._program.value):
            raise ProblemError(
                f"the convex program with N = {problem.samples}, r = {problem.rank}, k = {problem.wrong}, "
                f"lambda = {weight:g} was not solved: {self._program.status}"
            )
        c, s, nu = (np.asarray(part) for part in (self._c.value, self._s.value, self._constraint.dual_value))
        return Optimum(weight * c, s, weight * nu)
