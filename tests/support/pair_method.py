"""A method that is unlike the built-in ones, to show what the interface can carry, and a program that trains with it.

Two networks in one module, whose predictions are averaged; a K-float running mean of the prediction per sample, whose
rows travel both ways; between epochs, predictions on the training split, by which the samples of the next epoch are
chosen, and a weight that depends on all epochs before; its own readout.

    python -m tests.support.pair_method CONFIG [key=value ...]       under any launcher
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from sopdist.data.batch import Batch
from sopdist.data.parts import Part
from sopdist.data.plan import parts_of_ranks
from sopdist.methods import METHODS
from sopdist.methods.method import (
    Cost,
    Forward,
    Method,
    MethodSettings,
    Readout,
    Setup,
    StepOutput,
    TableCost,
    Trainer,
)
from sopdist.sample_table import Exchange, ExchangeStats, SampleTable
from tests.support.mean_table import MeanTable, visit

LEFT_OUT = 5  # every fifth sample


@dataclass(frozen=True)
class PairSettings(MethodSettings):
    """Two networks that agree."""

    name: Literal["pair"] = "pair"  # two networks that agree
    agreement: float = 0.5  # weight of their agreement with the mean prediction of a sample


class Pair(nn.Module):
    """Two networks side by side: (2, B, K) logits."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, images: Tensor) -> Tensor:
        """Logits of both."""
        return torch.stack([self.first(images), self.second(images)])


class PairMethod(Method):
    """Cross-entropy of both networks, and their distance to the running mean of a sample's predictions."""

    Settings = PairSettings
    settings: PairSettings

    def build_network(self, make: Callable[[], nn.Module]) -> nn.Module:
        """Two backbones in one module."""
        return Pair(make(), make())

    def backbone_weights(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The first network."""
        return {name.removeprefix("first."): value for name, value in weights.items() if name.startswith("first.")}

    def predict(self, forward: Forward, images: Tensor) -> Tensor:
        """The mean of both."""
        return forward(images).softmax(2).mean(0).log()

    def cost(self, samples: int, classes: int) -> Cost:  # noqa: ARG002 - one row costs the same in any table
        """A row of K float64 and a count."""
        row = 8 * classes + 2
        return Cost(2, (TableCost("mean", "dense", row, row, row, 2 * row),))

    def start(self, setup: Setup) -> None:
        """An empty table."""
        self._ranks = setup.ranks
        rank = 0 if setup.group is None else dist.get_rank(setup.group)
        self.table = MeanTable(setup.samples, setup.classes, first=rank, stride=setup.ranks)
        self.exchange = None if setup.group is None else Exchange(setup.group, self.table)
        self.mean_loss = torch.zeros(1)  # over the epochs so far, forgetting
        self.kept = torch.ones(setup.samples, dtype=torch.uint8)

    def between_epochs(self, epoch: int, trainer: Trainer) -> None:
        """From the second epoch on, leave out the fifth of the samples with the largest loss."""
        if epoch:
            losses = trainer.predictions(lambda logits, labels: F.cross_entropy(logits, labels, reduction="none")).cpu()
            self.mean_loss.mul_(0.5).add_(0.5 * losses.mean())
            self.kept.fill_(1)[losses.sort(stable=True).indices[-(len(losses) // LEFT_OUT) :]] = 0

    def parts(self, epoch: int) -> tuple[Part, ...]:
        """The samples that are kept."""
        return (Part(self.kept.nonzero()[:, 0].numpy() if epoch else None),)

    def prefetch(self, batch: NDArray[np.integer[Any]]) -> None:
        """Send rows ahead."""
        if self.exchange is not None:
            self.exchange.prefetch(parts_of_ranks(batch, self._ranks))

    def step(self, forward: Forward, batch: Batch) -> StepOutput:
        """Both losses and the agreement; the samples' means are updated."""
        logits = forward(batch.images)  # (2, B, K)
        mean_prediction = logits.softmax(2).mean(0)
        finite = torch.isfinite(logits).all(2).all(0)
        rows = self.table.sent_columns() if self.exchange is None else self.exchange.next_rows(batch.index)[0]
        target = rows[0][batch.index if self.exchange is None else slice(len(batch))].float()
        visit(self.table, self.exchange, batch.index, mean_prediction.detach().double())
        losses = sum(F.cross_entropy(view, batch.labels, reduction="none") for view in logits)
        agreement = self.settings.agreement * (1 + float(self.mean_loss))
        losses = losses + agreement * (mean_prediction - target).square().sum(1)
        return StepOutput((losses * batch.weight).sum(), logits.mean(0), finite)

    def flush(self) -> None:
        """Write rows that came back."""
        if self.exchange is not None:
            self.exchange.flush()

    def discard_prefetched(self) -> None:
        """Drop rows on their way."""
        if self.exchange is not None:
            self.exchange.discard_prefetched()

    def tables(self) -> dict[str, SampleTable]:
        """The means."""
        return {"mean": self.table}

    def state_dict(self) -> dict[str, Tensor]:
        """The mean loss, and the samples of the epoch."""
        return {"mean_loss": self.mean_loss, "kept": self.kept}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """The mean loss, and the samples of the epoch."""
        self.mean_loss.copy_(state["mean_loss"])
        self.kept.copy_(state["kept"])

    def fingerprint(self) -> dict[str, Any]:
        """A weight that must not change."""
        return {"agreement": self.settings.agreement}

    def readout(self, labels: Tensor) -> Readout:
        """Labels that the mean prediction contradicts."""
        self.flush()
        columns = [self.table.mean[:, k].contiguous() for k in range(self.table.num_classes)]
        visits = self.table.visits
        if self.exchange is not None:
            columns, visits = [self.exchange.gather_column(c) for c in columns], self.exchange.gather_column(visits)
        mean = torch.stack(columns, dim=1)
        best = mean.argmax(1)
        scores = 1 - mean.gather(1, labels[:, None])[:, 0]
        visited = visits > 0
        flags = (best != labels) & visited
        proposed = torch.where(flags, best, labels)
        return Readout(scores.float().numpy(), flags.numpy(), proposed.numpy(), visited.numpy(), {"rows": len(labels)})

    def exchange_stats(self) -> ExchangeStats:
        """Bytes and seconds."""
        return ExchangeStats() if self.exchange is None else self.exchange.stats()


def main(arguments: list[str]) -> int:
    """Train with the config and overrides on the command line."""
    from sopdist.train.run import run_config

    METHODS["pair"] = PairMethod
    config, *overrides = [word for word in arguments if not word.startswith("--")]
    return run_config(config, overrides, resume="auto" if "--resume" in arguments else "none")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
