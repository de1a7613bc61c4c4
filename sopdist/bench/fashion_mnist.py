"""`sopdist bench fashion-mnist`: test accuracy of SOP and other robust losses on Fashion-MNIST with wrong labels.

Trains a small network once for each method, kind of noise and seed. Prints, as Markdown, its accuracy on the clean test
set, the fraction of the wrong labels that it memorised, and how well SOP finds the wrong labels. The seed fixes the
subset of the images, the wrong labels, the initial weights and the batch order, so that methods differ only in the
loss. There is no augmentation. Without options, it reproduces the table of docs/benchmarks.md.

methods:
  ce                   cross-entropy, which memorises wrong labels
  gce, sl, elr         generalised and symmetric cross-entropy, early-learning regularisation
  sop                  SOP with its defaults: it waits for the onset of memorisation
  sop-flow             SOP that acts from the first visit: a label is flagged after 4 visits of steady disagreement
  sop-paper            the update rule of the paper at its printed rates (10, 10); -tuned: at (30, 300)
  sop-official         the update rule of the authors' code at its published rates (1, 10); -tuned: at (100, 300)

noise:
  sym-40, sym-60       each label is resampled from all ten classes with probability .4 or .6 (36% or 54% end up wrong)
  asym-40              each label becomes a class that it is often confused with, with probability .4 (28% end up wrong)
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from tqdm import tqdm

from .. import SOP, __version__
from ..cli.arguments import integer
from ..cli.output import cannot_write, write_json
from ..cli.tables import markdown
from ..errors import DataError
from ..noise import Paper
from .fashion_mnist_data import CLASSES, DEFAULT_DATA, NOISES, SIDE, Images, generator, make_images, read_split
from .robust_losses import ELR, GCE, SL, Loss, cross_entropy

WIDTH = 256
BATCH = 128
LEARNING_RATE = 0.02
MOMENTUM = 0.9
WEIGHT_DECAY = 5e-4

BASELINES: dict[str, Callable[[int], Loss]] = {
    "ce": lambda _samples: cross_entropy,
    "gce": lambda _samples: GCE(q=0.7),
    "sl": lambda _samples: SL(alpha=0.1, beta=1.0),
    "elr": lambda samples: ELR(samples, CLASSES, strength=3.0, beta=0.7),
}
# "paper" and "official": with the published rates, and with rates at which the table takes effect within 30 epochs.
SOPS: dict[str, dict[str, Any]] = {
    "sop": {},
    "sop-flow": {"variant": "flow", "visits": 4.0, "onset": "always"},
    "sop-paper": {"variant": "paper", "alpha_u": 10.0, "alpha_v": 10.0},
    "sop-paper-tuned": {"variant": "paper", "alpha_u": 30.0, "alpha_v": 300.0},
    "sop-official": {"variant": "official", "lr_u": 1.0, "lr_v": 10.0, "batch_size": BATCH},
    "sop-official-tuned": {"variant": "official", "lr_u": 100.0, "lr_v": 300.0, "batch_size": BATCH},
}
METHODS = (*BASELINES, *SOPS)


def make_network(seed: int) -> nn.Sequential:
    """An MLP 784-256-256-10 with BatchNorm."""
    torch.manual_seed(generator(seed, "weights").initial_seed())
    return nn.Sequential(
        *(nn.Linear(SIDE * SIDE, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.ReLU()),
        *(nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.ReLU()),
        nn.Linear(WIDTH, CLASSES),
    )


def batches(samples: int, epochs: int, order: torch.Generator) -> Iterator[Tensor]:
    """Sample indices (BATCH,) of every step, in a new order each epoch; an incomplete last batch is dropped."""
    for _ in range(epochs):
        full = torch.randperm(samples, generator=order)[: samples // BATCH * BATCH]
        yield from full.split(BATCH)


@dataclass(frozen=True)
class Detection:
    """How well a trained SOP separates wrong labels from clean ones; all values are in [0, 1]."""

    auroc_loss: float  # of noise_scores("loss")
    auroc_margin: float  # of noise_scores("margin")
    flag_precision: float | None  # None if nothing was flagged
    flag_recall: float
    proposals_right: float  # fraction of the wrong labels that proposed_labels() corrects
    noise_rate: float  # the estimate of noise_rate()


@dataclass(frozen=True)
class Run:
    """Results of one run; rates and accuracies are in [0, 1]."""

    method: str
    noise: str
    seed: int
    test_accuracy: float  # after the last epoch
    true_noise_rate: float
    memorised: float  # fraction of the wrong labels that the trained network predicts for their images
    seconds: float  # of training
    detection: Detection | None  # None if the method has no noise table


def make_loss(method: str, samples: int, seed: int) -> Loss:
    """Build the loss of a method."""
    return BASELINES[method](samples) if method in BASELINES else SOP(samples, CLASSES, seed=seed, **SOPS[method])


def train(images: Tensor, labels: Tensor, loss: Loss, *, epochs: int, seed: int) -> nn.Sequential:
    """Train a new network with this loss, with a cosine schedule of the learning rate that ends at 0."""
    network = make_network(seed)
    optimizer = torch.optim.SGD(
        network.parameters(), LEARNING_RATE, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY, fused=True
    )
    paper = loss if isinstance(loss, SOP) and isinstance(loss.rates, Paper) else None
    steps = epochs * (len(labels) // BATCH)
    for step, index in enumerate(batches(len(labels), epochs, generator(seed, "order"))):
        rate = LEARNING_RATE * (1 + math.cos(math.pi * step / steps)) / 2
        optimizer.param_groups[0]["lr"] = rate
        if paper is not None:
            paper.tau = rate
        loss(network(images[index]), labels[index], index).backward()
        optimizer.step()
        optimizer.zero_grad()
    return network.eval()


@torch.no_grad()
def predict(network: nn.Module, images: Tensor) -> Tensor:
    """Predicted class of each image, (N,)."""
    return torch.as_tensor(network(images)).argmax(dim=1)


def fraction(of: Tensor, among: Tensor) -> float | None:
    """Fraction of the mask `among` (N,) that is also in the mask `of` (N,); None if `among` is empty."""
    return float(of[among].float().mean()) if among.any() else None


def auroc(scores: Tensor, wrong: Tensor) -> float:
    """Area under the ROC curve of the scores (N,); samples that were never visited have -inf and rank last."""
    return float(roc_auc_score(wrong, scores.nan_to_num(neginf=torch.finfo(scores.dtype).min)))


def detect(sop: SOP, noisy: Tensor, clean: Tensor) -> Detection:
    """Compare the findings of the noise table about the noisy labels (N,) with the clean labels (N,)."""
    wrong, flags = noisy != clean, sop.flags()
    return Detection(
        auroc_loss=auroc(sop.noise_scores("loss"), wrong),
        auroc_margin=auroc(sop.noise_scores("margin"), wrong),
        flag_precision=fraction(wrong, among=flags),
        flag_recall=fraction(flags, among=wrong) or 0.0,
        proposals_right=fraction(sop.proposed_labels(noisy) == clean, among=wrong) or 0.0,
        noise_rate=sop.noise_rate(),
    )


def measure(images: Images, method: str, noise: str, seed: int, epochs: int) -> Run:
    """Add label noise, train on it and evaluate."""
    clean = images.train_labels
    noisy = NOISES[noise](clean, generator(seed, "noise"))
    wrong = noisy != clean
    loss = make_loss(method, len(clean), seed)
    start = time.perf_counter()
    network = train(images.train, noisy, loss, epochs=epochs, seed=seed)
    return Run(
        method=method,
        noise=noise,
        seed=seed,
        seconds=round(time.perf_counter() - start, 2),
        test_accuracy=float((predict(network, images.test) == images.test_labels).float().mean()),
        true_noise_rate=float(wrong.float().mean()),
        memorised=fraction(predict(network, images.train) == noisy, among=wrong) or 0.0,
        detection=detect(loss, noisy, clean) if isinstance(loss, SOP) else None,
    )


def percent(values: list[float]) -> str:
    """The mean in percent and, if there is more than one value, each value."""
    mean = f"{100 * sum(values) / len(values):.1f}"
    return f"{mean} ({', '.join(f'{100 * value:.1f}' for value in values)})" if len(values) > 1 else mean


def select(runs: list[Run], method: str, noise: str) -> list[Run]:
    """Runs of one table cell, one per seed."""
    return [run for run in runs if (run.method, run.noise) == (method, noise)]


def table_of(runs: list[Run], metric: Callable[[Run], float]) -> str:
    """One row per method, one column per kind of noise: the mean over the seeds and each seed, in percent."""
    methods, noises = (list(dict.fromkeys(getattr(run, name) for run in runs)) for name in ("method", "noise"))
    rows = [
        [method, *(percent([metric(run) for run in select(runs, method, noise)]) for noise in noises)]
        for method in methods
    ]
    return markdown(["", *noises], rows)


def detection_row(runs: list[Run]) -> list[str]:
    """Means over the seeds, for one SOP method and one kind of noise."""
    found = [run.detection for run in runs if run.detection is not None]
    precisions = [one.flag_precision for one in found if one.flag_precision is not None]
    return [
        *(runs[0].method, runs[0].noise),
        *(f"{np.mean([getattr(one, name) for one in found]):.3f}" for name in ("auroc_loss", "auroc_margin")),
        f"{np.mean(precisions):.2f}" if precisions else "none flagged",
        *(f"{np.mean([getattr(one, name) for one in found]):.2f}" for name in ("flag_recall", "proposals_right")),
        f"{np.mean([one.noise_rate for one in found]):.3f} / {np.mean([run.true_noise_rate for run in runs]):.3f}",
        f"{np.mean([run.memorised for run in runs]):.2f}",
    ]


def report(runs: list[Run]) -> str:
    """All tables, in Markdown."""
    parts = [
        "Test accuracy after the last epoch in percent, mean (each seed):",
        table_of(runs, lambda run: run.test_accuracy),
        "Wrong labels that the network memorised, in percent of all wrong labels:",
        table_of(runs, lambda run: run.memorised),
    ]
    cells = dict.fromkeys((run.method, run.noise) for run in runs if run.detection is not None)
    if cells:
        header = ["", "noise", "AUROC loss", "AUROC margin", "flag precision", "flag recall"]
        header += ["proposals right", "noise rate / true", "memorised"]
        parts += [
            "Detection of wrong labels, means over the seeds:",
            markdown(header, [detection_row(select(runs, *cell)) for cell in cells]),
        ]
    return "\n\n".join(parts)


def names_from(allowed: tuple[str, ...]) -> Callable[[str], list[str]]:
    """An argparse type: comma-separated names, all of them allowed."""

    def names(text: str) -> list[str]:
        chosen = list(dict.fromkeys(text.split(",")))
        for name in chosen:
            if name not in allowed:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(allowed)}")
        return chosen

    return names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `sopdist bench fashion-mnist`."""
    parser.epilog = """\
examples:
  sopdist bench fashion-mnist                                      everything, about a quarter of an hour
  sopdist bench fashion-mnist --methods ce,elr,sop --noise asym-40
  sopdist bench fashion-mnist --train 2000 --epochs 5 --seeds 1 --out quick.json"""
    add = parser.add_argument
    where = "folder of the four idx .gz files (default %(default)s, from Debian's dataset-fashion-mnist)"
    add("--data", type=Path, default=DEFAULT_DATA, metavar="DIR", help=where)
    add("--methods", type=names_from(METHODS), default=list(METHODS), metavar="A,B", help="methods (default all)")
    noises = tuple(NOISES)
    add("--noise", type=names_from(noises), default=list(noises), metavar="A,B", help="kinds of noise (default all)")
    add("--seeds", type=integer(1), default=2, metavar="N", help="number of seeds: 0 to N-1 (default %(default)s)")
    add("--epochs", type=integer(1), default=30, metavar="N", help="epochs per run (default %(default)s)")
    add("--train", type=integer(BATCH), default=15_000, metavar="N", help="training images (default %(default)s)")
    results = "JSON file for the settings and the results of every run (default %(default)s)"
    add("--out", type=Path, default=Path("results/noisy_fashion_mnist.json"), metavar="FILE", help=results)


def run(args: argparse.Namespace) -> int:
    """Run everything, then print the tables. The results file is written after each run, so a crash loses only one."""
    # A second thread hardly helps such a small network, and makes it at least ten times slower when another process
    # wants the core. One thread also makes the results independent of the number of cores.
    torch.set_num_threads(1)
    train_split, test_split = read_split(args.data, "train"), read_split(args.data, "t10k")
    if args.train > len(train_split.labels):
        raise DataError(f"--train {args.train}: there are only {len(train_split.labels)} training images")
    with cannot_write(args.out):
        args.out.parent.mkdir(parents=True, exist_ok=True)

    settings = {name: getattr(args, name) for name in ("methods", "noise", "seeds", "epochs", "train")}
    settings |= {"batch": BATCH, "lr": LEARNING_RATE, "momentum": MOMENTUM, "weight_decay": WEIGHT_DECAY}
    settings |= {"network": [SIDE * SIDE, WIDTH, WIDTH, CLASSES], "test": len(test_split.labels)}
    settings |= {"sop": {name: SOPS[name] for name in args.methods if name in SOPS}}
    versions = {"python": sys.version.split()[0], "torch": torch.__version__, "sopdist": __version__}
    runs: list[Run] = []
    with tqdm(total=args.seeds * len(args.noise) * len(args.methods), unit="run") as bar:
        for seed in range(args.seeds):
            images = make_images(train_split, test_split, args.train, seed)
            for noise in args.noise:
                for method in args.methods:
                    bar.set_description(f"{method}, {noise}, seed {seed}")
                    runs.append(measure(images, method, noise, seed, args.epochs))
                    content = {"settings": settings, "versions": versions, "runs": [asdict(done) for done in runs]}
                    write_json(args.out, content)
                    bar.update()
    print(report(runs))
    return 0
