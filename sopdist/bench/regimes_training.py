"""One run of `sopdist bench regimes`: a regime, a kind of noise, a method, a seed. Knows no other run.

A *regime* is how a network learns: quickly or slowly, briefly, from few samples, with augmentation. Whether a method
helps depends on that more than on anything else.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import SOP
from .fashion_mnist_data import generator
from .regimes_data import Data, make_data
from .robust_losses import ELR, GCE, Loss, cross_entropy

BATCH = 128
_SHIFT = 4  # pixels of random shifts


@dataclass(frozen=True)
class Regime:
    """How a network learns."""

    about: str
    data: str
    samples: int
    epochs: int
    lr: float
    noises: tuple[str, ...]
    network: Literal["mlp", "conv"] = "mlp"
    optimizer: Literal["sgd", "adamw"] = "sgd"
    schedule: Literal["cosine", "steps", "warm-up"] = "cosine"
    augment: bool = False


_ALL = ("clean", "sym-40", "sym-60", "asym-40", "inst-40")
REGIMES = {
    "quick": Regime("MLP, 15,000 images", "fashion", 15_000, 30, 0.02, _ALL),
    "steps": Regime("the same, learning rate in steps", "fashion", 15_000, 30, 0.02, ("sym-40",), schedule="steps"),
    "brief": Regime("the same, 5 epochs", "fashion", 15_000, 5, 0.02, ("clean", "sym-40")),
    "small": Regime("the same, 2,000 images", "fashion", 2_000, 30, 0.02, ("clean", "sym-40", "asym-40")),
    "slow": Regime(
        "MLP, shifts and flips, 15 epochs", "fashion", 15_000, 15, 0.02, ("clean", "sym-40", "inst-40"), augment=True
    ),
    "warm-up": Regime(
        "the same with warm-up", "fashion", 15_000, 15, 0.05, ("clean",), schedule="warm-up", augment=True
    ),
    "conv": Regime(
        "convolutions, shifts and flips, 8 epochs", "fashion", 8_000, 8, 0.003, ("clean", "asym-40"),
        network="conv", optimizer="adamw", augment=True,
    ),
    "conv-plain": Regime(
        "convolutions without augmentation, 20 epochs", "fashion", 4_000, 20, 0.003, ("clean", "sym-40", "inst-40"),
        network="conv", optimizer="adamw",
    ),
    "steps-slow": Regime(
        "MLP, shifts and flips, learning rate in steps", "fashion", 8_000, 24, 0.05, ("clean", "sym-40", "inst-40"),
        schedule="steps", augment=True,
    ),
    "small-slow": Regime(
        "MLP, 2,000 images, shifts and flips, 60 epochs", "fashion", 2_000, 60, 0.02, ("clean", "sym-40", "inst-40"),
        augment=True,
    ),
    "pairs": Regime("MLP, 100 classes", "pairs", 20_000, 30, 0.02, ("clean", "sym-40", "asym-40")),
    "features": Regime(
        "MLP on ImageNet features", "features", 5_000, 30, 0.02, ("clean", "sym-40", "asym-40", "inst-40")
    ),
    "digits": Regime("MLP, 1,297 digits", "digits", 1_297, 60, 0.02, ("clean", "sym-40")),
}  # fmt: skip

MakeLoss = Callable[[int, int, int], Loss]  # samples, classes, seed
METHODS: dict[str, MakeLoss] = {
    "ce": lambda _samples, _classes, _seed: cross_entropy,
    "gce": lambda _samples, _classes, _seed: GCE(),
    "elr": lambda samples, classes, _seed: ELR(samples, classes),
    "sop-always": lambda samples, classes, seed: SOP(samples, classes, seed=seed, onset="always"),
    "sop-auto": lambda samples, classes, seed: SOP(samples, classes, seed=seed, onset="auto"),
}
# What `elr-tuned` chooses from on noisy validation labels, besides the published setting: (strength, beta).
ELR_GRID = ((1.0, 0.7), (7.0, 0.7), (3.0, 0.9))
TUNED = {f"elr-{strength:g}-{beta:g}": (strength, beta) for strength, beta in ELR_GRID}


@dataclass(frozen=True)
class Task:
    """What to run."""

    regime: str
    noise: str
    method: str
    seed: int
    folder: Path  # of Fashion-MNIST
    cache_folder: Path
    epochs: int | None = None  # instead of the regime's
    samples: int | None = None


@dataclass(frozen=True)
class Result:
    """What came out; rates and accuracies are in [0, 1]."""

    regime: str
    noise: str
    method: str
    seed: int
    test: float  # accuracy after the last epoch
    validation: float  # accuracy on noisy labels that were held out
    wrong: float  # fraction of the training labels
    seconds: float
    onset: int | None = None  # of SOP; None: never, or not SOP
    provisional: bool | None = None
    rate: float | None = None  # noise_rate()
    low: float | None = None  # noise_rate_interval()
    high: float | None = None
    flagged: float | None = None  # share of the labels
    signal: Sequence[
        float | None
    ] = ()  # mean p_y of labels that were contradicted before, window by window until the onset
    flag_precision: float | None = None
    auroc: float | None = None

    @property
    def cell(self) -> tuple[str, str]:
        """Regime and noise."""
        return self.regime, self.noise


def run_task(task: Task) -> Result:
    """Train and measure. The same on any number of processes."""
    torch.set_num_threads(1)
    regime = REGIMES[task.regime]
    samples = task.samples or regime.samples
    data = make_data(regime.data, samples, task.noise, task.seed, task.folder, task.cache_folder)
    loss = _make_loss(task.method, len(data.noisy), data.classes, task.seed)
    begun = time.perf_counter()
    observed = _Observed(loss) if isinstance(loss, SOP) else loss
    network = train(regime, data, observed, task.epochs or regime.epochs, task.seed)
    return Result(
        task.regime,
        task.noise,
        task.method,
        task.seed,
        test=accuracy(network, data.test, data.test_labels),
        validation=accuracy(network, data.validation, data.validation_noisy),
        wrong=float((data.noisy != data.clean).float().mean()),
        seconds=round(time.perf_counter() - begun, 2),
        **(_detection(observed.sop, data) | {"signal": observed.signal} if isinstance(observed, _Observed) else {}),
    )


class _Observed:
    """SOP, with a record of the sign that it decides by: one value per epoch until the onset."""

    def __init__(self, sop: SOP) -> None:
        self.sop, self._epochs = sop, 0
        self.signal: list[float | None] = []

    def __call__(self, logits: Tensor, labels: Tensor, index: Tensor) -> Tensor:
        """Train."""
        self.sop.flush()
        if self.sop.epochs_observed > self._epochs:
            self._epochs = self.sop.epochs_observed
            self.signal.append(self.sop.contradicted_fit)
        loss: Tensor = self.sop(logits, labels, index)
        return loss


def _make_loss(method: str, samples: int, classes: int, seed: int) -> Loss:
    if method in TUNED:
        strength, beta = TUNED[method]
        return ELR(samples, classes, strength=strength, beta=beta)
    return METHODS[method](samples, classes, seed)


def _detection(sop: SOP, data: Data) -> dict[str, Any]:
    from .fashion_mnist import auroc

    sop.flush()
    wrong, flags = data.noisy != data.clean, sop.flags(data.noisy)
    found: dict[str, Any] = {"onset": sop.onset, "provisional": sop.provisional, "rate": sop.noise_rate(data.noisy)}
    found["low"], found["high"] = sop.noise_rate_interval(data.noisy)
    found["flagged"] = float(flags.float().mean())
    if wrong.any():
        found["auroc"] = auroc(sop.noise_scores(), wrong)
    if flags.any():
        found["flag_precision"] = float(wrong[flags].float().mean())
    return found


def train(regime: Regime, data: Data, loss: Loss, epochs: int, seed: int) -> nn.Module:
    """Train a new network."""
    network = make_network(regime.network, data.train[0].numel(), data.classes, seed)
    optimizer: torch.optim.Optimizer
    if regime.optimizer == "adamw":
        optimizer = torch.optim.AdamW(network.parameters(), regime.lr, weight_decay=0.01)
    else:
        optimizer = torch.optim.SGD(network.parameters(), regime.lr, momentum=0.9, weight_decay=5e-4)
    order, shifts = generator(seed, "order"), generator(seed, "shifts")
    steps = epochs * -(-len(data.noisy) // BATCH)
    for step, index in enumerate(_batches(len(data.noisy), epochs, order)):
        for group in optimizer.param_groups:
            group["lr"] = regime.lr * schedule(regime.schedule, step / steps)
        images = data.train[index]
        logits = network(shift_and_flip(images, shifts) if regime.augment else images)
        optimizer.zero_grad()
        loss(logits, data.noisy[index], index).backward()
        optimizer.step()
    return network.eval()


def _batches(samples: int, epochs: int, order: torch.Generator) -> Iterator[Tensor]:
    for _ in range(epochs):
        yield from torch.randperm(samples, generator=order).split(BATCH)


def schedule(name: str, progress: float) -> float:
    """Factor of the learning rate, `progress` being from 0 to 1."""
    if name == "steps":
        return 1.0 if progress < 0.5 else 0.1 if progress < 0.75 else 0.01
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return min(1.0, progress / 0.2) * cosine if name == "warm-up" else cosine


def make_network(kind: str, inputs: int, classes: int, seed: int) -> nn.Sequential:
    """An MLP with two hidden layers, or three convolutions, both with BatchNorm."""
    torch.manual_seed(generator(seed, "weights").initial_seed())
    if kind == "mlp":
        width = 256
        return nn.Sequential(
            nn.Flatten(),
            *(nn.Linear(inputs, width, bias=False), nn.BatchNorm1d(width), nn.ReLU()),
            *(nn.Linear(width, width, bias=False), nn.BatchNorm1d(width), nn.ReLU()),
            nn.Linear(width, classes),
        )
    layers: list[nn.Module] = [nn.Unflatten(1, (1, -1))]  # (B, 28, 28) -> (B, 1, 28, 28)
    for before, after in ((1, 16), (16, 32), (32, 64)):
        layers += [
            nn.Conv2d(before, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))


def shift_and_flip(images: Tensor, draws: torch.Generator) -> Tensor:
    """Each image (B, H, W) shifted by up to _SHIFT pixels, and mirrored with probability 1/2."""
    count, height, width = images.shape
    padded = F.pad(images, (_SHIFT,) * 4, value=float(images.min()))
    down, right = (torch.randint(2 * _SHIFT + 1, (count,), generator=draws) for _ in range(2))
    rows = (down[:, None] + torch.arange(height))[:, :, None]  # (B, H, 1)
    columns = (right[:, None] + torch.arange(width))[:, None, :]  # (B, 1, W)
    mirrored = torch.rand(count, generator=draws) < 0.5
    columns = torch.where(mirrored[:, None, None], columns.flip(2), columns)
    return padded[torch.arange(count)[:, None, None], rows, columns]


@torch.no_grad()
def accuracy(network: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Fraction of the labels that are predicted."""
    predicted = torch.cat([network(part).argmax(1) for part in images.split(2_000)])
    return float((predicted == labels).float().mean())
