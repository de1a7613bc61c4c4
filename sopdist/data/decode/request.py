"""The input and output types of a decoder, and the reading of encoded samples, which both decoders share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ...errors import DataError, StoreError
from ..augment.policy import Policy
from ..augment.recipes import Boxes, Recipe
from ..headers import ImageHeader, read_header
from ..split import Split

Views = Sequence[Policy | None]  # of every training image: weak (None) or strong


@dataclass(frozen=True)
class Request:
    """A batch to be decoded."""

    index: NDArray[np.int64]  # (B,)
    uniforms: tuple[NDArray[np.float64], ...]  # (B, 24) for each view; empty: the single view of an evaluation
    draws: Mapping[int, NDArray[np.float64]] = field(default_factory=dict)  # (B, POLICY_DRAWS) for each strong view

    @property
    def views(self) -> int:
        """The number of views of each sample."""
        return max(1, len(self.uniforms))


@dataclass(frozen=True)
class BadSample:
    """A sample that cannot be used."""

    index: int
    where: str  # shard, key and index
    reason: str


class Encoded(NamedTuple):
    """A sample as stored in its shard, and its image header, which has been checked."""

    data: bytes
    header: ImageHeader


@dataclass(frozen=True)
class Decoded:
    """A decoded batch. The images of bad samples are all 0."""

    views: list[Tensor]  # float32 (B, 3, size, size), normalised, channels last in memory
    bad: dict[int, BadSample]  # by position in the batch


class Decoder(Protocol):
    """Decodes batches in the background, in the order in which they are submitted."""

    def submit(self, request: Request) -> None:
        """Start decoding a batch."""

    def collect(self) -> Decoded:
        """Wait for the oldest submitted batch and return it."""

    def discard(self) -> None:
        """Drop all batches that were submitted and not collected."""

    def close(self) -> None:
        """Stop all threads."""

    def held_bytes(self) -> int:
        """Memory held for batches: pending encoded ones and the buffers of decoded ones."""


def read_sample(split: Split, index: int, max_pixels: int) -> Encoded | BadSample:
    """Read a sample and its image header. StoreError propagates, because the sample is not at fault."""
    try:
        data = split.image(index)
        return Encoded(data, read_header(data, max_pixels))
    except StoreError:
        raise
    except (DataError, OSError) as error:
        return bad_sample(split, index, error)


def bad_sample(split: Split, index: int, error: Exception) -> BadSample:
    """Describe a bad sample: which one, and what is wrong with it."""
    return BadSample(index, split.where(index), str(error))


def choose_boxes(
    recipe: Recipe, headers: Sequence[ImageHeader], uniforms: Sequence[NDArray[np.float64]]
) -> list[tuple[Boxes, NDArray[np.bool_]]]:
    """Boxes and mirroring for each view; without `uniforms`, those of evaluation."""
    width, height = np.array([(header.width, header.height) for header in headers], np.int64).reshape(-1, 2).T
    if not uniforms:
        return [(recipe.evaluation_boxes(width, height), np.zeros(len(headers), dtype=bool))]
    return [recipe.training_boxes(width, height, draws) for draws in uniforms]
