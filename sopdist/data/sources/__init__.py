"""Data sets that `sopdist prepare` can read: one module per source, imported when it is requested."""

from __future__ import annotations

import importlib
from typing import NamedTuple, cast

from ...errors import DataError
from .source import Source


class Entry(NamedTuple):
    """A source, by name."""

    location: str  # a module in this folder, or MODULE:OBJECT
    summary: str  # one line for --help
    needs_root: bool = True


SOURCES = {
    "clothing1m": Entry("clothing1m", "Clothing1M: a million photos of clothes, labelled from the surrounding text"),
    "webvision": Entry("webvision", "WebVision 1.0, or its mini version: search results for the classes of ImageNet"),
    "ilsvrc12-val": Entry("ilsvrc12", "ImageNet's validation images for the classes of mini WebVision"),
    "cifar10": Entry("cifar:CIFAR10", "CIFAR-10, optionally with the labels of CIFAR-10N"),
    "cifar100": Entry("cifar:CIFAR100", "CIFAR-100, optionally with the labels of CIFAR-100N"),
    "fashion-mnist": Entry("fashion_mnist", "Fashion-MNIST: 70,000 small grey images of clothes", needs_root=False),
    "digits": Entry("digits", "scikit-learn's 1,797 handwritten digits; needs no download", needs_root=False),
    "imagefolder": Entry("imagefolder", "your own images, one folder per class"),
    "csv": Entry("csv_list", "your own images, with a table of paths and labels"),
}


def load_source(name: str) -> Source:
    """Import the source `name`, which must be in SOURCES."""
    module, _, attribute = SOURCES[name].location.partition(":")
    try:
        found = importlib.import_module(f"{__name__}.{module}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("sopdist"):
            raise
        raise DataError(f"`sopdist prepare {name}` needs {error.name}: pip install 'sopdist[data]'") from None
    return cast(Source, getattr(found, attribute) if attribute else found)
