"""The linear model of the theory: y = J theta + s, with a low-rank J and a sparse s.

Also the paper's guarantee that theta and s can be recovered from y.

With the compact SVD J = U diag(sigma) V', every theta that matters lies in the span of V: theta = V c. Everything is
computed in the r coordinates c, in which J is `basis` = U diag(sigma) and norms are the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError

Array = NDArray[np.float64]
RECOVERED = 1e-3  # relative error below which theta or s counts as recovered


class ProblemError(DataError, ValueError):
    """Invalid sizes or rates. The message names the value and the valid range."""


@dataclass(frozen=True)
class Problem:
    """A model with its ground truth."""

    u: Array  # (N, r) orthonormal
    sigma: Array  # (r,) in descending order
    v: Array  # (p, r) orthonormal
    c: Array  # (r,): the true theta, the one with the smallest norm, is v @ c
    s: Array  # (N,): the error of each observation; mostly 0
    y: Array  # (N,): the observations

    @property
    def basis(self) -> Array:
        """(N, r): J in the coordinates c."""
        return self.u * self.sigma

    @property
    def jacobian(self) -> Array:
        """(N, p): J."""
        return self.basis @ self.v.T

    @property
    def samples(self) -> int:
        """N."""
        return len(self.y)

    @property
    def rank(self) -> int:
        """r."""
        return len(self.sigma)

    @property
    def wrong(self) -> int:
        """k: the number of wrong observations."""
        return int(np.count_nonzero(self.s))


@dataclass(frozen=True)
class Guarantee:
    """The paper's guarantee for a problem: if it holds, every lambda above `threshold` recovers theta and s."""

    coherence: float
    holds: bool  # k^2 r < N / (4 mu)
    threshold: float  # infinite if the guarantee does not hold


def random_problem(samples: int, parameters: int, rank: int, wrong: int, generator: np.random.Generator) -> Problem:
    """J is a product of two Gaussian matrices, N x r and r x p; theta and `wrong` entries of s are Gaussian."""
    check_sizes(samples, parameters, rank, wrong)
    jacobian = generator.standard_normal((samples, rank)) @ generator.standard_normal((rank, parameters))
    theta = generator.standard_normal(parameters)
    s = np.zeros(samples)
    s[generator.choice(samples, wrong, replace=False)] = generator.standard_normal(wrong)
    return make_problem(jacobian, theta, s)


def make_problem(jacobian: Array, theta: Array, s: Array) -> Problem:
    """The problem with observations J theta + s. Its true theta is the shortest one with the same J theta."""
    u, sigma, v = compact_svd(jacobian)
    return Problem(u, sigma, v, v.T @ theta, s, jacobian @ theta + s)


def compact_svd(matrix: Array) -> tuple[Array, Array, Array]:
    """U (N, r), sigma (r,), V (p, r) with matrix = U diag(sigma) V', where r is its rank."""
    u, sigma, vt = np.linalg.svd(matrix, full_matrices=False)
    rank = int((sigma > sigma[0] * max(matrix.shape) * np.finfo(float).eps).sum()) if sigma[0] > 0 else 0
    if rank == 0:
        raise ProblemError("J is zero: theta cannot be observed")
    return u[:, :rank], sigma[:rank], vt[:rank].T


def check_sizes(samples: int, parameters: int, rank: int, wrong: int) -> None:
    """Raise ProblemError unless a problem of these sizes exists."""
    for name, value in (("N", samples), ("p", parameters), ("r", rank)):
        if value < 1:
            raise ProblemError(f"{name} = {value}: must be at least 1")
    if not 0 <= wrong <= samples:
        raise ProblemError(f"k = {wrong}: must be from 0 to N = {samples}, the number of observations")
    limit = min(samples, parameters)
    if rank > limit:
        raise ProblemError(f"r = {rank}: a matrix of N x p = {samples} x {parameters} has at most rank {limit}")


def check_positive(name: str, value: float) -> None:
    """Raise ProblemError unless `value` is a finite number above 0."""
    if not (math.isfinite(value) and value > 0):
        raise ProblemError(f"{name} = {value:g}: must be a finite number above 0")


def coherence(u: Array) -> float:
    """mu(J) = N / r max_i |U' e_i|^2: from 1 (all observations have the same weight) to N / r (only one counts)."""
    samples, rank = u.shape
    return float(samples / rank * (u**2).sum(axis=1).max())


def guarantee(problem: Problem) -> Guarantee:
    """The paper's guarantee of exact recovery for this problem.

    With a = k sqrt(r mu / N), the null space property holds with rho = a / (1 - a) if a < 1/2, and lambda must then be
    above 2 (1 + rho) / (1 - rho) |U Sigma^-1 V' theta|_inf. (Half of that is enough: the proof omits the factor 1/2 of
    the objective.)
    """
    mu = coherence(problem.u)
    a = problem.wrong * math.sqrt(problem.rank * mu / problem.samples)
    if a >= 0.5:
        return Guarantee(mu, holds=False, threshold=math.inf)
    rho = a / (1 - a)
    pull = np.abs(problem.u @ (problem.c / problem.sigma)).max()
    return Guarantee(mu, holds=True, threshold=float(2 * (1 + rho) / (1 - rho) * pull))


def relative_error(found: Array, truth: Array) -> float:
    """|found - truth| / |truth|, or |found| if the truth is 0."""
    size = float(np.linalg.norm(truth))
    return float(np.linalg.norm(found - truth)) / (size or 1.0)


def relative_difference(one: Array, other: Array) -> float:
    """|one - other| divided by the larger of the two norms; 0 if both are 0."""
    size = max(float(np.linalg.norm(one)), float(np.linalg.norm(other)))
    return float(np.linalg.norm(one - other)) / (size or 1.0)


def trial_generator(seed: int, *key: int) -> np.random.Generator:
    """The random numbers of one trial: a function of the seed and the trial's key, not of the order of trials."""
    return np.random.default_rng([seed, *key])
