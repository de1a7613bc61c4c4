"""`sopdist demo`: real handwritten digits, 40% of the training labels redrawn at random, CE against SOP side by side.

Both networks start from the same weights and see the same batches; only the loss differs. The data is scikit-learn's
`load_digits` (1,797 images of 8 x 8), which is inside its wheel, so nothing is downloaded.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from .noise import SOP

CLASSES = 10
TEST_SHARE = 0.25
BATCH = 64
SHADES = " .:-=+*#%@"

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


class Digits(NamedTuple):
    """The data of the demo; `given` are the training labels after noise, `true` before."""

    train: Tensor  # (N, 64) in [0, 1]
    true: Tensor  # (N,)
    given: Tensor  # (N,)
    test: Tensor  # (T, 64)
    test_labels: Tensor  # (T,)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `sopdist demo`."""
    parser.add_argument("--noise", type=float, default=0.4, help="share of training labels drawn anew at random (0.4)")
    parser.add_argument("--epochs", type=int, default=60, help="passes over the training data (60)")
    parser.add_argument("--seed", type=int, default=0, help="of noise, split, weights and order (0)")


def run(args: argparse.Namespace) -> int:
    """Train both networks, print the comparison and the five most suspicious samples."""
    if not 0 <= args.noise <= 1 or args.epochs < 1:
        print("sopdist demo: --noise must be in [0, 1] and --epochs at least 1", file=sys.stderr)
        return 2
    torch.set_num_threads(1)  # so small a network is no faster with more, and much slower on a busy machine
    data = load_digits_with_noise(args.noise, args.seed)
    wrong = data.given != data.true
    print(
        f"{len(data.train):,} training images of handwritten digits, {len(data.test)} test images.\n"
        f"{args.noise:.0%} of the training labels were drawn anew at random: {wrong.float().mean():.1%} are wrong.\n"
    )
    torch.manual_seed(args.seed)
    ce_model = make_model()
    sop_model = copy.deepcopy(ce_model)
    sop = SOP(num_samples=len(data.train), num_classes=CLASSES, seed=args.seed, epochs=args.epochs)
    train({"CE": (ce_model, plain_cross_entropy), "SOP": (sop_model, sop)}, data, args.epochs, args.seed)
    print_comparison(ce_model, sop_model, sop, data)
    print_suspects(sop, data, count=5)
    return 0


def load_digits_with_noise(noise: float, seed: int) -> Digits:
    """Split the digits and draw each training label anew, over all classes, with probability `noise`."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise SystemExit("sopdist demo needs scikit-learn for its data: pip install 'sopdist[demo]'") from error
    pixels, labels = load_digits(return_X_y=True)
    images, true = torch.from_numpy(pixels).float() / 16, torch.from_numpy(labels).long()
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(images), generator=generator)
    cut = int(len(images) * TEST_SHARE)
    test, train = order[:cut], order[cut:]
    redrawn = torch.rand(len(train), generator=generator) < noise
    given = torch.where(redrawn, torch.randint(CLASSES, (len(train),), generator=generator), true[train])
    return Digits(images[train], true[train], given, images[test], true[test])


def make_model() -> nn.Module:
    """A small network, large enough to memorise every label if the loss asks for it."""
    return nn.Sequential(
        nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(),
        nn.Linear(256, 256), nn.BatchNorm1d(256), nn.ReLU(),
        nn.Linear(256, CLASSES),
    )  # fmt: skip


def plain_cross_entropy(logits: Tensor, labels: Tensor, index: Tensor) -> Tensor:  # noqa: ARG001 - SOP's signature
    """What everybody uses."""
    return F.cross_entropy(logits, labels)


def train(runs: dict[str, tuple[nn.Module, Loss]], data: Digits, epochs: int, seed: int) -> None:
    """Train each network with its own loss on the same batches; the bar shows both test accuracies."""
    optimizers = {
        name: torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)
        for name, (model, _) in runs.items()
    }
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs) for optimizer in optimizers.values()]
    generator = torch.Generator().manual_seed(seed)
    with tqdm(range(epochs), desc="training both", unit="epoch") as bar:
        for _ in bar:
            order = torch.randperm(len(data.train), generator=generator)
            for index in order.split(BATCH)[: len(order) // BATCH]:
                for name, (model, loss_of) in runs.items():
                    model.train()
                    loss = loss_of(model(data.train[index]), data.given[index], index)
                    loss.backward()
                    optimizers[name].step()
                    optimizers[name].zero_grad()
            for schedule in schedules:
                schedule.step()
            bar.set_postfix_str(
                "test accuracy "
                + ", ".join(
                    f"{name} {accuracy(model, data.test, data.test_labels):.1%}" for name, (model, _) in runs.items()
                )
            )


@torch.no_grad()
def predict(model: nn.Module, images: Tensor) -> Tensor:
    """Predicted classes."""
    model.eval()
    prediction: Tensor = model(images).argmax(1)
    return prediction


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Share of right predictions."""
    return float((predict(model, images) == labels).float().mean())


def print_comparison(ce_model: nn.Module, sop_model: nn.Module, sop: SOP, data: Digits) -> None:
    """Test accuracy, memorised wrong labels, and how well SOP tells wrong labels from right ones."""
    from sklearn.metrics import roc_auc_score

    wrong = data.given != data.true
    rows = [("test accuracy", [accuracy(model, data.test, data.test_labels) for model in (ce_model, sop_model)])]
    if wrong.any():
        memorised = [accuracy(model, data.train[wrong], data.given[wrong]) for model in (ce_model, sop_model)]
        rows.append(("wrong labels memorised", memorised))
    print(f"\n{'':24}{'CE':>8}{'SOP':>8}")
    for name, (ce, ours) in rows:
        print(f"{name:24}{ce:8.1%}{ours:8.1%}")
    if wrong.any() and not wrong.all():
        flags, proposed = sop.flags(), sop.proposed_labels(data.given)
        auroc = roc_auc_score(wrong, sop.noise_scores())
        print(
            f"\nSOP ranks wrong labels before right ones with an AUROC of {auroc:.3f}.\n"
            f"It flags {int(flags.sum())} labels: {float(wrong[flags].float().mean()):.1%} of these are wrong, "
            f"and they are {float(flags[wrong].float().mean()):.1%} of all wrong ones.\n"
            f"Estimated noise {sop.noise_rate():.1%}, true {float(wrong.float().mean()):.1%}. "
            f"Labels right as given {float((~wrong).float().mean()):.1%}, "
            f"as proposed {float((proposed == data.true).float().mean()):.1%}."
        )


def print_suspects(sop: SOP, data: Digits, count: int) -> None:
    """The most suspicious samples, drawn in characters."""
    suspects = sop.suspects(count)
    proposed = sop.proposed_labels(data.given)
    print(f"\nThe {count} most suspicious labels:\n")
    pictures = [draw(data.train[i]) for i in suspects]
    for line in zip(*pictures, strict=True):
        print("   ".join(line))
    for what, values in (
        ("sample", suspects),
        ("given", data.given[suspects]),
        ("proposed", proposed[suspects]),
        ("true", data.true[suspects]),
    ):
        print("   ".join(f"{f'{what} {int(value)}':16}" for value in values))


def draw(image: Tensor) -> list[str]:
    """An 8 x 8 image as 8 lines of 16 characters."""
    shades = (image.reshape(8, 8) * (len(SHADES) - 1)).round().long()
    return ["".join(SHADES[int(shade)] * 2 for shade in line) for line in shades]
