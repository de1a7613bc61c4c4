"""What a source is: something that lists its images in a fixed order and reads one by number.

A source is a module of this folder with `add_arguments(parser)`, `find_splits(args)` and a docstring that shows the
expected layout, which is its `--help`. It knows one data set and nothing of shards.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class SourceSplit:
    """One split as it is found in the source. The order of `paths` is the order in the shards."""

    dataset: str
    name: str  # train, val, test, ...: the folder under --out
    classes: tuple[str, ...]
    paths: list[str]  # of each image, relative and with forward slashes; becomes its key
    labels: dict[str, NDArray[np.int64]]  # label sets of the same length; "given" must be among them, -1 is unknown
    read: Callable[[int], bytes]  # number -> the encoded image; OSError or ImageError if that fails. Thread-safe.
    origins: dict[str, dict[str, Any]] = field(default_factory=dict)  # where each label set comes from


class Source(Protocol):
    """A module that knows a data set."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options that only this source has; --root and --out are there already."""

    def find_splits(self, args: argparse.Namespace) -> list[SourceSplit]:
        """All splits that the source has, in the order in which they are prepared. DataError says what is missing."""
