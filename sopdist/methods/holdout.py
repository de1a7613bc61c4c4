"""A part of the training split that is held out, and the best weights so far by the loss on it.

For methods that need a network chosen on noisy validation labels. The seed determines the samples.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from .method import PerSample, Setup, Trainer

_STREAM = 4  # of random numbers, see `GlobalBatch.draws`
_WEIGHTS = "best/"  # prefix in a method's state


class Holdout:
    """Samples that are not trained on, and the weights with the smallest loss on them."""

    def __init__(self, setup: Setup, share: float, losses: PerSample) -> None:
        """`losses`: the loss of each sample by which weights are chosen, such as `cross_entropies` or `errors`."""
        self._losses = losses
        draws = np.random.Generator(np.random.Philox(key=setup.seed, counter=[0, 0, 0, _STREAM]))
        labelled = np.flatnonzero(setup.labels >= 0)
        count = min(max(1, round(share * len(labelled))), len(labelled) - 1)
        self.samples: NDArray[np.int64] = np.sort(draws.permutation(labelled)[:count])
        self._all = setup.samples
        self.loss = torch.full((1,), torch.inf, dtype=torch.float64)
        self.best: dict[str, Tensor] = {}

    @property
    def others(self) -> NDArray[np.int64]:
        """The samples to train on."""
        return np.setdiff1d(np.arange(self._all), self.samples, assume_unique=True)

    def consider(self, trainer: Trainer) -> None:
        """Keep the current weights if their loss on the holdout is the smallest so far."""
        losses = trainer.predictions(self._losses, samples=self.samples)
        known = losses[torch.isfinite(losses)]
        loss = known.double().mean() if len(known) else torch.tensor(torch.inf)
        if float(loss) <= float(self.loss) or not self.best:  # of equal ones the latest, which has learned more
            self.loss.fill_(float(loss))
            self.best = trainer.weights()

    def state_dict(self) -> dict[str, Tensor]:
        """The best weights and their loss."""
        return {"holdout_loss": self.loss} | {_WEIGHTS + name: value for name, value in self.best.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore them."""
        self.loss.copy_(state["holdout_loss"])
        self.best = {
            name.removeprefix(_WEIGHTS): value.clone() for name, value in state.items() if name.startswith(_WEIGHTS)
        }


def cross_entropies(logits: Tensor, labels: Tensor) -> Tensor:
    """-log p_y of each sample."""
    return F.cross_entropy(logits, labels, reduction="none")


def errors(logits: Tensor, labels: Tensor) -> Tensor:
    """1 for samples that are predicted as another class than their label, else 0."""
    return (logits.argmax(1) != labels).float()
