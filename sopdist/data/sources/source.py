"""What a source is: something that lists its images in a fixed order and reads one by number.

A source is a module of this folder with `add_arguments(parser)`, `find_splits(args)` and a docstring that shows the
expected layout, which is its `--help`. It knows one data set and nothing of shards.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError


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
    held_out: float | None = None  # the share of its training images that --val makes another split of


class Source(Protocol):
    """A module that knows a data set."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options that only this source has; --root and --out are there already."""

    def find_splits(self, args: argparse.Namespace) -> list[SourceSplit]:
        """The splits that the source has, in the order in which they are prepared. DataError says what is missing.

        Those that `args.splits` does not ask for may be left out, with the files that only they need.
        """


def asked_for(names: Sequence[str], splits: str | None) -> list[str]:
    """Those of the splits `names` that --splits names, in their own order; without it all of them."""
    if splits is None:
        return list(names)
    wanted = [name.strip() for name in splits.split(",")]
    for name in wanted:
        if name not in names:
            raise DataError(f"--splits {splits}: no split {name!r}; there is {', '.join(names)}")
    return [name for name in names if name in wanted]
