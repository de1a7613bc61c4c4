"""Drives a method step by step without the trainer: batches made by hand, a linear network, a stand-in for the trainer.

View v of sample i is a unit vector of its own, so that every sample can have any logits (`set_logits`), and an image
that a method mixed says itself of which images it consists (`parts_of_mixed`).

    driver = Driver(ELRSettings(), labels=[0, 1, 2, 0], classes=3)
    driver.begin(epoch=0)
    taken = driver.step(driver.batch([0, 1, 2, 3]))
    taken.loss, taken.outputs[-1].grad
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sopdist.data.batch import Batch
from sopdist.data.parts import Part
from sopdist.methods import MethodSettings, PerSample, Predict, Setup, StepOutput, make_method

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Taken:
    """A step that was taken."""

    output: StepOutput
    inputs: list[tuple[Tensor, ...]]  # of every forward pass: the images, flattened
    outputs: list[Tensor]  # of every forward pass: the logits as the method saw them, with `grad`

    @property
    def loss(self) -> float:
        return float(self.output.loss.detach())


class Driver:
    """A method in one process, with a linear network on `samples` images."""

    def __init__(
        self,
        settings: MethodSettings,
        labels: Sequence[int],
        classes: int,
        *,
        epochs: int = 10,
        batch: int = 0,
        seed: int = 0,
        backbone: Callable[[int, int], nn.Module] | None = None,
    ) -> None:
        """`backbone` makes another network than the linear one, from the numbers of features and classes."""
        self.method = make_method(settings)
        self.labels, self.classes, self.samples = np.array(labels), classes, len(labels)
        self.views = len(self.method.views())
        torch.manual_seed(seed)
        features = self.views * self.samples
        self.network = self.method.build_network(lambda: (backbone or linear)(features, classes))
        self.trainer = StandIn(self)
        self.nonfinite: dict[int, float] = {}  # samples whose logits are not finite, and what they are
        self._inputs: list[tuple[Tensor, ...]] = []
        self._outputs: list[Tensor] = []
        setup = Setup(self.samples, classes, epochs, batch or self.samples, self.labels, seed, CPU, None)
        self.method.start(setup)

    def begin(self, epoch: int) -> tuple[Part, ...]:
        """Begin an epoch as the trainer does; returns its parts."""
        self.method.between_epochs(epoch, self.trainer)
        self.method.begin_epoch(epoch)
        return self.method.parts(epoch)

    def images(self, samples: Sequence[int] | NDArray[np.int64], view: int = 0) -> Tensor:
        """A view of these samples, (B, 1, 1, features)."""
        return torch.eye(self.views * self.samples)[torch.as_tensor(samples) + view * self.samples][:, None, None]

    def batch(
        self, samples: Sequence[int], weight: Sequence[float] | None = None, part: Sequence[int] | None = None
    ) -> Batch:
        """The batch of these samples, with weight 1 unless their label is unknown."""
        labels = self.labels[list(samples)]
        given = torch.tensor([1.0] * len(labels) if weight is None else weight)
        return Batch(
            self.images(samples),
            torch.from_numpy(labels.clip(min=0)),
            torch.tensor(samples),
            given.where(torch.from_numpy(labels >= 0), 0),
            tuple(self.images(samples, view) for view in range(1, self.views)),
            None if part is None else torch.tensor(part),
        )

    def batch_of_parts(self, parts: Sequence[Part]) -> Batch:
        """One batch with the columns of all parts side by side, each filled with its first samples, repeated."""
        samples: list[int] = []
        numbers: list[int] = []
        for number, part in enumerate(parts):
            of_part = np.arange(self.samples) if part.samples is None else part.samples
            columns = part.columns or self.samples
            if len(of_part):
                samples += np.resize(of_part, columns).tolist()
                numbers += [number] * columns
        return self.batch(samples, part=numbers if len(parts) > 1 else None)

    def step(self, batch: Batch, lr: float = 0.0) -> Taken:
        """A step of the method and, with `lr`, one of plain gradient descent."""
        self._inputs, self._outputs = [], []
        self.network.zero_grad()
        self.method.prefetch(batch.index.numpy())
        output = self.method.step(self.forward, batch)
        output.loss.backward()
        with torch.no_grad():
            for parameter in self.network.parameters():
                if parameter.grad is not None:
                    parameter.sub_(lr * parameter.grad)
        self.method.flush()
        return Taken(output, self._inputs, self._outputs)

    def forward(self, *images: Tensor) -> Tensor:
        """The network; logits of images that contain a sample in `nonfinite` are not finite."""
        flat = [image.flatten(1) for image in images]
        output: Tensor = self.network(*images)
        for sample, value in self.nonfinite.items():
            views = torch.arange(self.views) * self.samples + sample
            touched = torch.cat([image[:, views].any(1) for image in flat])
            touched = touched.repeat(len(output) // len(touched))  # both networks of a pair saw the same images
            output = output.masked_fill(touched[:, None], value)
        if output.requires_grad:
            output.retain_grad()
        self._inputs.append(tuple(flat))
        self._outputs.append(output)
        return output

    def set_logits(self, logits: Any, network: nn.Module | None = None) -> None:
        """Let the network, or one of a pair, have these logits (samples, K), or (samples, views, K), on every view."""
        wanted = torch.as_tensor(np.array(logits), dtype=torch.float32)
        if wanted.dim() == 2:
            wanted = wanted[:, None].expand(-1, self.views, -1)
        layer = list((network or self.network).modules())[-1]
        assert isinstance(layer, nn.Linear)
        with torch.no_grad():
            layer.weight.copy_(wanted.movedim(1, 0).flatten(0, 1).T)
            layer.bias.zero_()

    def table(self, name: str) -> dict[str, Tensor]:
        """A copy of the columns of a sample table."""
        return {column: value.clone() for column, value in self.method.tables()[name].state_dict().items()}


def linear(features: int, classes: int) -> nn.Module:
    """The network of a driver."""
    return nn.Sequential(nn.Flatten(), nn.Linear(features, classes))


class StandIn:
    """What a method asks of the trainer, done by the network of a driver."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.unreadable: set[int] = set()
        self.drawn_samples: NDArray[np.int64] | None = None
        self.restarts = 0

    @torch.no_grad()
    def predictions(
        self, per_sample: PerSample, *, predict: Predict | None = None, samples: NDArray[np.int64] | None = None
    ) -> Tensor:
        driver = self._driver
        everyone = np.arange(driver.samples)
        logits = (predict or driver.method.predict)(driver.forward, driver.images(everyone)).float()
        found = per_sample(logits, torch.from_numpy(driver.labels.clip(min=0))).float()
        asked = np.isin(everyone, everyone if samples is None else samples)
        readable = asked & (driver.labels >= 0) & ~np.isin(everyone, list(self.unreadable))
        found[torch.from_numpy(~readable)] = torch.nan
        return found

    def drawn(self, epoch: int) -> NDArray[np.int64] | None:  # noqa: ARG002
        return self.drawn_samples

    def weights(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self._driver.network.state_dict().items()}

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        self._driver.network.load_state_dict(dict(weights))

    def restart(self) -> None:
        self.restarts += 1
        with torch.no_grad():
            for parameter in self._driver.network.parameters():
                parameter.normal_(generator=torch.Generator().manual_seed(self.restarts))


def parts_of_mixed(images: Tensor) -> list[dict[int, float]]:
    """Of every mixed image (B, features), which unit vectors it consists of, and their shares."""
    return [{int(at): float(row[at]) for at in row.nonzero()[:, 0]} for row in images.detach()]


def softmax(logits: Any) -> NDArray[np.float64]:
    """In float64, over the last axis."""
    z = np.asarray(logits, dtype=np.float64)
    exponents = np.exp(z - z.max(-1, keepdims=True))
    result: NDArray[np.float64] = exponents / exponents.sum(-1, keepdims=True)
    return result
