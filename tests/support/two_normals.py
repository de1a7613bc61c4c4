"""The mixture of two normal distributions that `sopdist.methods.mixture` fits, fitted by scikit-learn instead."""

from __future__ import annotations

import warnings

import numpy as np
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture

Array = NDArray[np.float64]


def small_posterior(values: Array, *, tolerance: float = 1e-6, iterations: int = 200) -> Array:
    """The probability (N,) of the component with the smaller mean, from a start at the quartiles."""
    means = np.quantile(values, (0.25, 0.75))
    if means[0] == means[1]:
        means = np.array([values.min(), values.max()])
    precision = 1 / (values.var() + 5e-4)
    mixture = GaussianMixture(
        2, reg_covar=5e-4, tol=tolerance, max_iter=iterations,
        means_init=means[:, None], weights_init=[0.5, 0.5], precisions_init=np.full((2, 1, 1), precision),
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        mixture.fit(values[:, None])
    posterior: Array = mixture.predict_proba(values[:, None])[:, mixture.means_[:, 0].argmin()]
    return posterior


def rescaled(losses: Array) -> Array:
    """To [0, 1]."""
    result: Array = (losses - losses.min()) / (losses.max() - losses.min())
    return result
