"""Selects the decoder backend."""

from __future__ import annotations

import torch

from ...errors import DataError
from ..augment.recipes import Recipe
from ..settings import DataSettings
from ..split import Split
from .cpu import CpuDecoder
from .request import Decoder, Views


def open_decoder(split: Split, recipe: Recipe, views: Views, settings: DataSettings, *, batch: int) -> Decoder:
    """Open the decoder selected by `data.backend` and `data.device`, for batches of at most `batch` samples."""
    backend = settings.backend
    if backend == "auto":
        backend = "dali" if torch.cuda.is_available() else "cpu"
    if settings.device is not None and (backend != "dali" or settings.device >= torch.cuda.device_count()):
        raise DataError(
            f"data.device = {settings.device}: needs backend dali and a GPU with that index; the backend is {backend}, "
            f"and there are {torch.cuda.device_count()} GPUs"
        )
    threads = settings.usable_threads()
    if backend == "cpu":
        return CpuDecoder(split, recipe, views, threads, settings.max_pixels)
    from .dali import DaliDecoder

    return DaliDecoder(split, recipe, views, threads, settings.max_pixels, batch=batch, device=settings.device)
