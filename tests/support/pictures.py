"""Images for tests: real encoded images with a smooth structure, like photos."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image


def picture(seed: int, width: int = 64, height: int = 48) -> Image.Image:
    """An RGB image of a few waves of colour with a little grain; the same arguments give the same image."""
    draw = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width] / max(width, height)  # (height, width) each
    planes = []
    for _ in range(3):
        waves = sum(
            np.sin(2 * np.pi * (draw.uniform(-2, 2) * x + draw.uniform(-2, 2) * y) + draw.uniform(0, 7))
            for _ in range(3)
        )
        planes.append(128 + 35 * waves + draw.normal(0, 3, (height, width)))
    return Image.fromarray(np.stack(planes, axis=-1).clip(0, 255).astype(np.uint8))


def encoded(image: Image.Image, format: str = "JPEG", **options: Any) -> bytes:  # noqa: A002 - Pillow's name
    """The encoded image; `options` are passed to Pillow's `save`."""
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()
