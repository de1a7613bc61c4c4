"""Which decoder runs where: the only place that decides."""

from __future__ import annotations

import torch

from ..augment.recipes import Recipe
from ..settings import DataSettings
from ..split import Split
from .cpu import CpuDecoder
from .request import Decoder


def open_decoder(split: Split, recipe: Recipe, settings: DataSettings, batch: int, views: int) -> Decoder:
    """The decoder that `data.backend` and `data.device` ask for, for batches of at most `batch` samples."""
    backend = settings.backend
    if backend == "auto":
        backend = "dali" if torch.cuda.is_available() else "cpu"
    threads = settings.usable_threads()
    if backend == "cpu":
        return CpuDecoder(split, recipe, threads, settings.max_pixels)
    from .dali import DaliDecoder

    return DaliDecoder(split, recipe, threads, settings.max_pixels, batch, views, settings.device)
