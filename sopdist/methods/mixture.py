"""A mixture of two normal distributions in one dimension, fitted by EM, to tell small losses from large ones.

Deterministic: EM starts at the quartiles, so the same losses always give the same result. float64 throughout.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MIN_VARIANCE = 5e-4  # added to both variances, for losses that were scaled to [0, 1]; published
_TOLERANCE = 1e-6  # of the mean log-likelihood
_MAX_ITERATIONS = 200

Array = NDArray[np.float64]


def scaled(losses: Array) -> Array:
    """Losses scaled to [0, 1] over those that are finite; all 0 if they are equal."""
    known = losses[np.isfinite(losses)]
    low, high = (known.min(), known.max()) if len(known) else (0.0, 0.0)
    return (losses - low) / (high - low) if high > low else np.where(np.isfinite(losses), 0.0, losses)


def small_component(values: Array) -> Array:
    """The posterior probability (N,) that each value belongs to the component with the smaller mean.

    NaN where the value is not finite. If all values are equal there is one component: 1 for all.
    """
    posterior = np.full(len(values), np.nan)
    known = np.isfinite(values)
    x = values[known].astype(np.float64)
    if not len(x):
        return posterior
    if x.min() == x.max():
        posterior[known] = 1.0
        return posterior
    means = np.quantile(x, (0.25, 0.75))
    if means[0] == means[1]:
        means = np.array([x.min(), x.max()])
    variances = np.full(2, x.var() + _MIN_VARIANCE)
    weights = np.full(2, 0.5)
    before = -np.inf
    for _ in range(_MAX_ITERATIONS):
        responsibilities, likelihood = _expect(x, means, variances, weights)  # (2, N)
        mass = responsibilities.sum(1) + 1e-12
        weights = mass / mass.sum()
        means = (responsibilities @ x) / mass
        variances = (responsibilities * (x - means[:, None]) ** 2).sum(1) / mass + _MIN_VARIANCE
        if abs(likelihood - before) < _TOLERANCE:  # it may fall a little, since variances are kept away from 0
            break
        before = likelihood
    posterior[known] = _expect(x, means, variances, weights)[0][int(means.argmin())]
    return posterior


def _expect(x: Array, means: Array, variances: Array, weights: Array) -> tuple[Array, float]:
    """Responsibilities (2, N), and the mean log-likelihood."""
    squares = (x - means[:, None]) ** 2 / variances[:, None]
    joint = np.log(weights)[:, None] - 0.5 * (squares + np.log(2 * np.pi * variances)[:, None])
    total = np.logaddexp(joint[0], joint[1])
    return np.exp(joint - total), float(total.mean())
