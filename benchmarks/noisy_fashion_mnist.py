"""Accuracy on wrong labels: SOP beside the losses of `robust_losses`, on Fashion-MNIST with labels made wrong.

One run = one method, one kind of noise, one seed. The seed fixes the subset, the wrong labels, the initial weights and
the order of the batches, and all methods share it, so that they differ in the loss alone. The training loop is
deliberately bare, without augmentation and without a loader: what is measured is the loss.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from robust_losses import ELR, GCE, SL, Loss, cross_entropy
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from tqdm import tqdm

from sopdist import SOP, __version__
from sopdist.noise import Paper

DEFAULT_DATA = Path("/usr/share/datasets/fashion-mnist")
CLASSES = 10
SIDE = 28
WIDTH = 256
BATCH = 128
LEARNING_RATE = 0.02
MOMENTUM = 0.9
WEIGHT_DECAY = 5e-4

# What is often taken for what: shirt and T-shirt, pullover and coat, sandal and sneaker, boot for sneaker.
CONFUSED = {0: 6, 6: 0, 2: 4, 4: 2, 5: 7, 7: 5, 9: 7}

PEERS: dict[str, Callable[[int], Loss]] = {
    "ce": lambda _samples: cross_entropy,
    "gce": lambda _samples: GCE(q=0.7),
    "sl": lambda _samples: SL(alpha=0.1, beta=1.0),
    "elr": lambda samples: ELR(samples, CLASSES, strength=3.0, beta=0.7),
}
# "paper" and "official" with the rates as published, and with rates that let the table act within 30 epochs.
SOPS: dict[str, dict[str, Any]] = {
    "sop-flow": {"variant": "flow", "visits": 4.0},
    "sop-paper": {"variant": "paper", "alpha_u": 10.0, "alpha_v": 10.0},
    "sop-paper-tuned": {"variant": "paper", "alpha_u": 30.0, "alpha_v": 300.0},
    "sop-official": {"variant": "official", "lr_u": 1.0, "lr_v": 10.0, "batch_size": BATCH},
    "sop-official-tuned": {"variant": "official", "lr_u": 100.0, "lr_v": 300.0, "batch_size": BATCH},
}
METHODS = (*PEERS, *SOPS)


# -- the images --------------------------------------------------------------------------------------------------------


class Split(NamedTuple):
    """Images (N, 28, 28) uint8 and their true labels (N,) int64, as the files have them."""

    images: Tensor
    labels: Tensor


def read_idx(path: Path, dimensions: int) -> Tensor:
    """The uint8 array of a gzipped idx file: bytes 0, 0, 8, dimensions; each dimension in four bytes; the values."""
    try:
        content = gzip.decompress(path.read_bytes())
    except (EOFError, gzip.BadGzipFile, zlib.error) as problem:
        raise ValueError(f"{path} is damaged: {problem}") from problem
    magic = bytes((0, 0, 8, dimensions))
    if content[:4] != magic:
        raise ValueError(f"{path} is not an idx file: it starts with {content[:4].hex()}, not {magic.hex()}")
    start = 4 + 4 * dimensions
    if len(content) < start:
        raise ValueError(f"{path} is damaged: it ends within its header")
    shape = np.frombuffer(content, ">u4", count=dimensions, offset=4).astype(int).tolist()
    if len(content) - start != math.prod(shape):
        raise ValueError(f"{path} is damaged: {math.prod(shape)} values announced, {len(content) - start} found")
    return torch.tensor(np.frombuffer(content, np.uint8, offset=start).reshape(shape))


def read_split(folder: Path, name: str) -> Split:
    """The split "train" or "t10k" of Fashion-MNIST."""
    image_file, label_file = folder / f"{name}-images-idx3-ubyte.gz", folder / f"{name}-labels-idx1-ubyte.gz"
    for path in (image_file, label_file):
        if not path.is_file():
            raise ValueError(
                f"{path} is missing. Fashion-MNIST comes with Debian's package dataset-fashion-mnist "
                f"(apt-get install dataset-fashion-mnist); if you have its four .gz files elsewhere, say --data DIR"
            )
    images, labels = read_idx(image_file, 3), read_idx(label_file, 1).long()
    if images.shape[1:] != (SIDE, SIDE):
        raise ValueError(f"{image_file} has images of {tuple(images.shape[1:])} pixels, not {SIDE} x {SIDE}")
    if len(images) != len(labels):
        raise ValueError(f"{label_file} has {len(labels)} labels for {len(images)} images")
    if len(labels) and labels.max() >= CLASSES:
        raise ValueError(f"{label_file} has the label {int(labels.max())}; the classes are 0 to {CLASSES - 1}")
    return Split(images, labels)


# -- what the seed decides ---------------------------------------------------------------------------------------------


def generator(seed: int, purpose: str) -> torch.Generator:
    """A random stream of its own for each seed and purpose."""
    state = np.random.SeedSequence([seed, zlib.crc32(purpose.encode())]).generate_state(1)
    return torch.Generator().manual_seed(int(state[0]))


def symmetric(labels: Tensor, draws: torch.Generator, *, rate: float) -> Tensor:
    """With probability `rate` a label is drawn anew from all classes; so rate (1 - 1/K) of them are wrong."""
    redrawn = torch.rand(len(labels), generator=draws) < rate
    return torch.where(redrawn, torch.randint(CLASSES, labels.shape, generator=draws), labels)


def asymmetric(labels: Tensor, draws: torch.Generator, *, rate: float) -> Tensor:
    """With probability `rate` a label becomes the class it is often CONFUSED with; three classes stay as they are."""
    other = torch.tensor([CONFUSED.get(k, k) for k in range(CLASSES)])
    return torch.where(torch.rand(len(labels), generator=draws) < rate, other[labels], labels)


NOISES: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "sym-40": partial(symmetric, rate=0.4),
    "sym-60": partial(symmetric, rate=0.6),
    "asym-40": partial(asymmetric, rate=0.4),
}


class Images(NamedTuple):
    """One seed's data: standardised pixels (N, 784) float32 and true labels (N,) int64, to train and to test on."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor


def make_images(train: Split, test: Split, count: int, seed: int) -> Images:
    """A random subset of `count` training images, and all test images; standardised as the subset's pixels are."""
    subset = torch.randperm(len(train.labels), generator=generator(seed, "subset"))[:count]
    pixels = train.images[subset].flatten(1).float()  # (count, 784)
    mean, deviation = pixels.mean(), pixels.std()
    test_pixels = test.images.flatten(1).float()
    return Images((pixels - mean) / deviation, train.labels[subset], (test_pixels - mean) / deviation, test.labels)


def make_network(seed: int) -> nn.Sequential:
    """The MLP 784-256-256-10 with BatchNorm."""
    torch.manual_seed(generator(seed, "weights").initial_seed())
    return nn.Sequential(
        *(nn.Linear(SIDE * SIDE, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.ReLU()),
        *(nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.ReLU()),
        nn.Linear(WIDTH, CLASSES),
    )


def batches(samples: int, epochs: int, order: torch.Generator) -> Iterator[Tensor]:
    """Sample numbers (BATCH,) of every step, in a new order each epoch; what does not fill a batch is left out."""
    for _ in range(epochs):
        full = torch.randperm(samples, generator=order)[: samples // BATCH * BATCH]
        yield from full.split(BATCH)


# -- one run -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Detection:
    """How well a finished SOP tells wrong labels from right ones; shares in [0, 1]."""

    auroc_loss: float  # of noise_scores("loss") against the truth
    auroc_margin: float  # of noise_scores("margin")
    flag_precision: float | None  # None: nothing was flagged
    flag_recall: float
    proposals_right: float  # of the wrong labels, how many proposed_labels() puts right
    noise_rate: float  # as estimated by noise_rate()


@dataclass(frozen=True)
class Run:
    """The figures of one run; shares in [0, 1]."""

    method: str
    noise: str
    seed: int
    test_accuracy: float  # after the last epoch
    true_noise_rate: float
    memorised: float  # of the wrong labels, how many the network predicts for their training images in the end
    seconds: float  # of training
    detection: Detection | None  # None: the method has no noise table


def make_loss(method: str, samples: int, seed: int) -> Loss:
    """The loss that a method's name stands for."""
    return PEERS[method](samples) if method in PEERS else SOP(samples, CLASSES, seed=seed, **SOPS[method])


def train(images: Tensor, labels: Tensor, loss: Loss, *, epochs: int, seed: int) -> nn.Sequential:
    """Train a new network with this loss; the learning rate falls to 0 along a half cosine, step by step."""
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
    """The predicted class of each image, (N,)."""
    return torch.as_tensor(network(images)).argmax(dim=1)


def share(which: Tensor, among: Tensor) -> float | None:
    """The share of `which` (N,) among the samples in the mask `among` (N,); None if there are none."""
    return float(which[among].float().mean()) if among.any() else None


def auroc(scores: Tensor, wrong: Tensor) -> float:
    """Area under the ROC curve of the scores (N,); a sample that was never visited, -inf, ranks last."""
    return float(roc_auc_score(wrong, scores.nan_to_num(neginf=torch.finfo(scores.dtype).min)))


def detect(sop: SOP, noisy: Tensor, clean: Tensor) -> Detection:
    """Compare what the table says about the noisy labels (N,) with the truth."""
    wrong, flags = noisy != clean, sop.flags()
    return Detection(
        auroc_loss=auroc(sop.noise_scores("loss"), wrong),
        auroc_margin=auroc(sop.noise_scores("margin"), wrong),
        flag_precision=share(wrong, among=flags),
        flag_recall=share(flags, among=wrong) or 0.0,
        proposals_right=share(sop.proposed_labels(noisy) == clean, among=wrong) or 0.0,
        noise_rate=sop.noise_rate(),
    )


def do_run(images: Images, method: str, noise: str, seed: int, epochs: int) -> Run:
    """Make labels wrong, train on them, measure."""
    clean = images.train_labels
    noisy = NOISES[noise](clean, generator(seed, "noise"))
    wrong = noisy != clean
    loss = make_loss(method, len(clean), seed)
    begin = time.perf_counter()
    network = train(images.train, noisy, loss, epochs=epochs, seed=seed)
    return Run(
        method=method,
        noise=noise,
        seed=seed,
        seconds=round(time.perf_counter() - begin, 2),
        test_accuracy=float((predict(network, images.test) == images.test_labels).float().mean()),
        true_noise_rate=float(wrong.float().mean()),
        memorised=share(predict(network, images.train) == noisy, among=wrong) or 0.0,
        detection=detect(loss, noisy, clean) if isinstance(loss, SOP) else None,
    )


# -- the report --------------------------------------------------------------------------------------------------------


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows))


def percent(values: list[float]) -> str:
    """The mean in percent and, where there is more than one value, each of them."""
    mean = f"{100 * sum(values) / len(values):.1f}"
    return f"{mean} ({', '.join(f'{100 * value:.1f}' for value in values)})" if len(values) > 1 else mean


def select(runs: list[Run], method: str, noise: str) -> list[Run]:
    """The runs of one cell of a table, one a seed."""
    return [run for run in runs if (run.method, run.noise) == (method, noise)]


def table_of(runs: list[Run], figure: Callable[[Run], float]) -> str:
    """One row a method, one column a kind of noise: the mean over the seeds and each seed's value, in percent."""
    methods, noises = (list(dict.fromkeys(getattr(run, name) for run in runs)) for name in ("method", "noise"))
    rows = [
        [method, *(percent([figure(run) for run in select(runs, method, noise)]) for noise in noises)]
        for method in methods
    ]
    return markdown(["", *noises], rows)


def detection_row(runs: list[Run]) -> list[str]:
    """Means over the seeds of one SOP method on one kind of noise."""
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
        "Wrong labels that the network has memorised, percent of all wrong labels:",
        table_of(runs, lambda run: run.memorised),
    ]
    cells = dict.fromkeys((run.method, run.noise) for run in runs if run.detection is not None)
    if cells:
        header = ["", "noise", "AUROC loss", "AUROC margin", "flag precision", "flag recall"]
        header += ["proposals right", "noise rate / true", "memorised"]
        parts += [
            "Finding the wrong labels, means over the seeds:",
            markdown(header, [detection_row(select(runs, *cell)) for cell in cells]),
        ]
    return "\n\n".join(parts)


def write_results(path: Path, settings: dict[str, Any], runs: list[Run]) -> None:
    """Everything as JSON. Called after each run: an interrupted benchmark keeps what it has measured."""
    versions = {"python": sys.version.split()[0], "torch": torch.__version__, "sopdist": __version__}
    content = {"settings": settings, "versions": versions, "runs": [asdict(run) for run in runs]}
    path.write_text(json.dumps(content, indent=1) + "\n")


# -- the command line --------------------------------------------------------------------------------------------------


def names_from(allowed: tuple[str, ...]) -> Callable[[str], list[str]]:
    """An argparse type: comma-separated names, all of them allowed."""

    def names(text: str) -> list[str]:
        chosen = list(dict.fromkeys(text.split(",")))
        for name in chosen:
            if name not in allowed:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(allowed)}")
        return chosen

    return names


def at_least(smallest: int) -> Callable[[str], int]:
    """An argparse type: an integer not below `smallest`."""

    def integer(text: str) -> int:
        if not text.isdecimal() or int(text) < smallest:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least {smallest}")
        return int(text)

    return integer


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="""\
Train a small network on Fashion-MNIST with labels made wrong on purpose, once for each method, kind of noise and seed,
and print as Markdown how well it does on the clean test set, how many of the wrong labels it has memorised, and how
well SOP tells which labels are wrong. Without options: the published table.

methods:
  ce                   cross-entropy, which memorises wrong labels
  gce, sl, elr         generalised and symmetric cross-entropy, early-learning regularisation
  sop-flow             SOP as it comes: a label is explained away after 4 visits of steady disagreement
  sop-paper            the paper's steps at its printed rates (10, 10); -tuned: at (30, 300)
  sop-official         the steps of the authors' code at its published rates (1, 10); -tuned: at (100, 300)

noise:
  sym-40, sym-60       with probability .4 or .6 a label is drawn anew from all ten classes (36% or 54% end up wrong)
  asym-40              with probability .4 it becomes a class it is often confused with, as shirt and T-shirt (28%)""",
        epilog="""\
examples:
  python benchmarks/noisy_fashion_mnist.py                                   everything, about a quarter of an hour
  python benchmarks/noisy_fashion_mnist.py --methods ce,elr,sop-flow --noise asym-40
  python benchmarks/noisy_fashion_mnist.py --train 2000 --epochs 5 --seeds 1 --out quick.json""",
    )
    add = parser.add_argument
    where = "folder of the four idx .gz files (default %(default)s, from Debian's dataset-fashion-mnist)"
    add("--data", type=Path, default=DEFAULT_DATA, metavar="DIR", help=where)
    add("--methods", type=names_from(METHODS), default=list(METHODS), metavar="A,B", help="which methods (default all)")
    noises = tuple(NOISES)
    add("--noise", type=names_from(noises), default=list(noises), metavar="A,B", help="kinds of noise (default all)")
    add("--seeds", type=at_least(1), default=2, metavar="N", help="how many seeds: 0 to N-1 (default %(default)s)")
    add("--epochs", type=at_least(1), default=30, metavar="N", help="epochs of each run (default %(default)s)")
    add("--train", type=at_least(BATCH), default=15_000, metavar="N", help="training images (default %(default)s)")
    results = "where to write settings and figures of every run as JSON (default %(default)s)"
    add("--out", type=Path, default=Path("results/noisy_fashion_mnist.json"), metavar="FILE", help=results)
    return parser.parse_args()


def main() -> None:
    """Do all runs, then print the tables."""
    args = parse_arguments()
    # So small a network gains little from a second thread and stalls, ten times as slow and more, when another process
    # wants its core. And with one thread the figures do not depend on the number of cores.
    torch.set_num_threads(1)
    try:
        train_split, test_split = read_split(args.data, "train"), read_split(args.data, "t10k")
        if args.train > len(train_split.labels):
            raise ValueError(f"--train {args.train} asks for more than the {len(train_split.labels)} training images")
        args.out.parent.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as problem:
        sys.exit(f"error: {problem}")

    settings = {name: getattr(args, name) for name in ("methods", "noise", "seeds", "epochs", "train")}
    settings |= {"batch": BATCH, "lr": LEARNING_RATE, "momentum": MOMENTUM, "weight_decay": WEIGHT_DECAY}
    settings |= {"network": [SIDE * SIDE, WIDTH, WIDTH, CLASSES], "test": len(test_split.labels)}
    settings |= {"sop": {name: SOPS[name] for name in args.methods if name in SOPS}}
    runs: list[Run] = []
    with tqdm(total=args.seeds * len(args.noise) * len(args.methods), unit="run") as bar:
        for seed in range(args.seeds):
            images = make_images(train_split, test_split, args.train, seed)
            for noise in args.noise:
                for method in args.methods:
                    bar.set_description(f"{method}, {noise}, seed {seed}")
                    runs.append(do_run(images, method, noise, seed, args.epochs))
                    write_results(args.out, settings, runs)
                    bar.update()
    print(report(runs))


if __name__ == "__main__":
    main()
