"""Forward correction (Patrini et al., CVPR 2017): predict the given label through a matrix of labelling errors.

    loss = -log sum_i p_i T_iy          T_ij = probability that class i was labelled as class j

A run has two stages. The first is cross-entropy without a holdout, on which the best network is chosen. Row i of T
is then that network's prediction for an anchor: the sample that looks most like class i or, with `percentile`, the one
just below the most extreme ones. In the second stage, a fresh network learns with the loss above, from all samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ..data.parts import Part
from ..errors import ConfigError
from .holdout import Holdout, cross_entropies
from .method import LossMethod, MethodSettings, Setup, Trainer

_TINY = 1e-7  # smallest probability of an error; published


@dataclass(frozen=True)
class ForwardSettings(MethodSettings):
    """Forward correction with an estimated transition matrix."""

    name: Literal["forward"] = "forward"  # forward correction: cross-entropy first, then a fresh network
    first_epochs: int | None = None  # epochs of cross-entropy first; null: half of train.epochs; published: 120 of 240
    holdout: float = 0.1  # share of the samples on which the network that estimates the matrix is chosen
    percentile: float | None = 97.0  # anchors are below this percentile; null: no limit, as published for CIFAR-100

    def __post_init__(self) -> None:
        if self.first_epochs is not None and self.first_epochs < 1:
            raise ConfigError(f"method.first_epochs = {self.first_epochs}: must be at least 1")
        if not 0 < self.holdout < 1:
            raise ConfigError(f"method.holdout = {self.holdout}: must be more than 0 and less than 1")
        if self.percentile is not None and not 0 < self.percentile <= 100:
            raise ConfigError(f"method.percentile = {self.percentile}: must be more than 0 and at most 100, or null")


class ForwardCorrection(LossMethod):
    """Cross-entropy, then the corrected loss with a fresh network."""

    Settings = ForwardSettings
    settings: ForwardSettings
    _corrected = False

    def stages(self, epochs: int) -> tuple[int, ...]:
        """Before and after the matrix is estimated."""
        first = self._first_stage(epochs)
        return (first, epochs - first) if first < epochs else (epochs,)

    def _first_stage(self, epochs: int) -> int:
        wanted = self.settings.first_epochs
        return min(epochs, max(1, epochs // 2) if wanted is None else wanted)

    def start(self, setup: Setup) -> None:
        """Until it is estimated, the matrix is the identity: no errors."""
        self._epochs = self._first_stage(setup.epochs)
        if self.settings.first_epochs is not None and self._epochs >= setup.epochs:
            wanted = self.settings.first_epochs
            raise ConfigError(f"method.first_epochs = {wanted}: must be less than train.epochs = {setup.epochs}")
        self.holdout = Holdout(setup, self.settings.holdout, cross_entropies)
        self.transition = torch.eye(setup.classes, dtype=torch.float64, device=setup.device)

    def between_epochs(self, epoch: int, trainer: Trainer) -> None:
        """In the first stage, look for the best network; at its end, estimate the matrix and restart."""
        if 0 < epoch <= self._epochs:
            self.holdout.consider(trainer)
        if epoch == self._epochs:
            trainer.load_weights(self.holdout.best)
            predicted = trainer.predictions(lambda logits, _: logits.softmax(1)).double().cpu().numpy()
            self.transition.copy_(torch.from_numpy(estimate_transition(predicted, self.settings.percentile)))
            trainer.restart()
            self.holdout.best = {}

    def fingerprint(self) -> dict[str, Any]:
        """The length of the first stage, which depends on `train.epochs` unless it is set."""
        return {"first_epochs": self._epochs}

    def begin_epoch(self, epoch: int) -> None:
        """Set which stage this is."""
        self._corrected = epoch >= self._epochs

    def parts(self, epoch: int) -> tuple[Part, ...]:
        """All samples; in the first stage, without the holdout."""
        return (Part(self.holdout.others if epoch < self._epochs else None),)

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy, or the corrected loss."""
        if not self._corrected:
            return F.cross_entropy(logits, labels, reduction="none")
        return forward_losses(logits, labels, self.transition.float())

    def state_dict(self) -> dict[str, Tensor]:
        """The matrix, and the best network of the first stage."""
        return {"transition": self.transition} | self.holdout.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore them."""
        self.transition.copy_(state["transition"])
        self.holdout.load_state_dict(state)


def estimate_transition(predicted: NDArray[np.float64], percentile: float | None) -> NDArray[np.float64]:
    """The matrix (K, K) from predictions (N, K): row i is the prediction for the anchor of class i, scaled to sum 1.

    Rows with NaN are ignored. The first of equal candidates is taken. With `percentile`, samples whose probability of
    class i is at or above it (the next higher value that occurs) are not candidates for class i; if none is below,
    all are.
    """
    known = predicted[np.isfinite(predicted).all(axis=1)]
    if not len(known):
        raise ValueError("no training sample can be read, so the transition matrix cannot be estimated")
    rows = []
    for class_ in range(predicted.shape[1]):
        column = known[:, class_]
        if percentile is not None:
            limit = np.percentile(column, percentile, method="higher")
            below = column < limit
            column = np.where(below, column, -1.0) if below.any() else column
        rows.append(known[column.argmax()])
    matrix = np.clip(np.array(rows), _TINY, None)
    result: NDArray[np.float64] = matrix / matrix.sum(axis=1, keepdims=True)
    return result


def forward_losses(logits: Tensor, labels: Tensor, transition: Tensor) -> Tensor:
    """-log sum_i p_i T_iy of each sample (B,), for your own loop; `transition` is (K, K); its rows sum to 1."""
    to_given = transition.clamp_min(_TINY).log()[:, labels].T  # (B, K): log T_iy
    return -torch.logsumexp(logits.log_softmax(1) + to_given, dim=1)
