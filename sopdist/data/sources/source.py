"""The interface of a source: it lists the images of a data set in a fixed order and reads them one by one.

A source is a module in this folder with `add_arguments(parser)`, `find_splits(args)` and a docstring that describes the
expected file layout and is printed by `--help`. A source handles one data set and does not know about shards.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError


@dataclass(frozen=True)
class SourceSplit:
    """One split of a source. The order of `paths` is the order in the shards."""

    dataset: str
    name: str  # train, val, test, ...; also the name of its folder in --out
    classes: tuple[str, ...]
    paths: list[str]  # one per image, relative and with forward slashes; becomes the key
    labels: dict[str, NDArray[np.int64]]  # label sets of that length; "given" is required, -1 means unknown
    read: Callable[[int], bytes]  # position in `paths` -> encoded image; raises OSError or ImageError. Thread-safe.
    origins: dict[str, dict[str, Any]] = field(default_factory=dict)  # origin of each label set
    held_out: float | None = None  # fraction of the training images that --val moves to another split


class Source(Protocol):
    """A module that reads one data set."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options specific to this source; --root and --out already exist."""

    def find_splits(self, args: argparse.Namespace) -> list[SourceSplit]:
        """The splits of the source, in the order in which they are prepared. Raises DataError if files are missing.

        Splits that `args.splits` does not select may be left out, and files that only they need may be missing.
        """


def select_splits(names: Sequence[str], splits: str | None) -> list[str]:
    """The splits in `names` that --splits selects, in the order of `names`; all of them if it is None."""
    if splits is None:
        return list(names)
    wanted = [name.strip() for name in splits.split(",")]
    for name in wanted:
        if name not in names:
            raise DataError(f"--splits {splits}: no split {name!r}; available: {', '.join(names)}")
    return [name for name in names if name in wanted]
