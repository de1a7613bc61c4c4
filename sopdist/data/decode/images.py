"""Decodes an image of any supported format to upright RGB pixels.

For ordinary files the decoders are bit-identical: simplejpeg, Pillow and DALI all use libjpeg-turbo with the accurate
DCT, libpng and libwebp.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image

from ...errors import ImageError
from ..headers import JPEG, PNG, WEBP, ImageHeader
from .pixels import Pixels
from .png import decode_png

_NAMES = {JPEG: "JPEG", PNG: "PNG", WEBP: "WebP"}  # Pillow's names, up to case

# EXIF orientation -> the transform that undoes it. Arrays are (height, width, 3).
_UPRIGHT: dict[int, Callable[[Pixels], Pixels]] = {
    2: lambda pixels: pixels[:, ::-1],
    3: lambda pixels: pixels[::-1, ::-1],
    4: lambda pixels: pixels[::-1],
    5: lambda pixels: pixels.swapaxes(0, 1),
    6: lambda pixels: pixels.swapaxes(0, 1)[:, ::-1],
    7: lambda pixels: pixels.swapaxes(0, 1)[::-1, ::-1],
    8: lambda pixels: pixels.swapaxes(0, 1)[::-1],
}


def upright(pixels: Pixels, orientation: int) -> Pixels:
    """Undo the EXIF orientation of an image, (height, width, 3)."""
    return _UPRIGHT[orientation](pixels) if orientation in _UPRIGHT else pixels


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert any mode to 8-bit RGB. Transparency is dropped; 16-bit grey keeps its upper byte."""
    if image.mode == "F":
        raise ImageError("floating-point pixels, whose range is unknown")
    if image.mode.startswith("I"):  # Pillow's own conversion would clip everything above 255
        grey = np.clip(np.asarray(image).astype(np.int64) >> 8, 0, 255).astype(np.uint8)
        return Image.fromarray(grey).convert("RGB")
    return image.convert("RGB")


def decode_image(data: bytes, header: ImageHeader) -> Pixels:
    """Decode to upright RGB, uint8 (height, width, 3).

    Grey and palette images become RGB, transparency is dropped, 16 bits become 8, and an animation is reduced to its
    first frame.
    """
    pixels = _decode_fast(data, header) if header.plain else None
    if pixels is None:
        pixels = _decode_with_pillow(data, header)
    pixels = upright(pixels, header.orientation)
    if pixels.shape != (header.height, header.width, 3):
        raise ImageError(
            f"decoded to {pixels.shape[1]} x {pixels.shape[0]}, but its header says {header.width} x {header.height}"
        )
    return np.ascontiguousarray(pixels)


def _decode_fast(data: bytes, header: ImageHeader) -> Pixels | None:
    """Decode without Pillow, to the same pixels. None if there is no such decoder or the file is unusual."""
    if header.format == JPEG:
        jpeg = _jpeg_decoder()
        return None if jpeg is None else jpeg(data)
    return decode_png(data) if header.format == PNG else None


@functools.cache
def _jpeg_decoder() -> Callable[[bytes], Pixels | None] | None:
    """The fast JPEG decoder, if simplejpeg is installed."""
    try:
        import simplejpeg
    except ImportError:
        return None

    def decode(data: bytes) -> Pixels | None:
        """None if the file is unusual: it has stray bytes, which are harmless, or is damaged. Pillow decides which."""
        try:
            # The accurate options cost nothing and are bit-identical to Pillow and DALI.
            pixels: Pixels = simplejpeg.decode_jpeg(data, "RGB", fastdct=False, fastupsample=False, strict=True)
        except ValueError:
            return None
        return pixels

    return decode


def _decode_with_pillow(data: bytes, header: ImageHeader) -> Pixels:
    try:
        image: Any = Image.open(io.BytesIO(data), formats=[name.upper() for name in _NAMES.values()])
        image.load()
        return np.asarray(to_rgb(image))
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise ImageError(f"damaged {_NAMES[header.format]}: {error}") from None
