"""From an encoded image to upright RGB pixels, whatever its format. Decoders of ordinary files agree to the bit here:
simplejpeg, Pillow and DALI all rest on libjpeg-turbo with its accurate transform, libpng and libwebp."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image

from ..errors import ImageError
from ..headers import JPEG, PNG, WEBP, ImageHeader
from .pixels import Pixels
from .png import decode_png

_NAMES = {JPEG: "JPEG", PNG: "PNG", WEBP: "WebP"}  # as Pillow calls them, but for case

# EXIF orientation -> what undoes it. Arrays are (height, width, 3).
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
    """(height, width, 3) as it is meant to be seen, by its EXIF orientation."""
    return _UPRIGHT[orientation](pixels) if orientation in _UPRIGHT else pixels


def to_rgb(image: Image.Image) -> Image.Image:
    """8-bit RGB, whatever the mode: transparency is dropped, 16-bit grey keeps its upper byte."""
    if image.mode == "F":
        raise ImageError("floating-point pixels, whose range is not known")
    if image.mode.startswith("I"):  # Pillow's own conversion would cut everything above 255
        grey = np.clip(np.asarray(image).astype(np.int64) >> 8, 0, 255).astype(np.uint8)
        return Image.fromarray(grey).convert("RGB")
    return image.convert("RGB")


def decode_image(data: bytes, header: ImageHeader) -> Pixels:
    """Decode to (height, width, 3) bytes of RGB, upright. Grey and palette images become RGB, transparency is dropped,
    of an animation the first frame is taken, 16 bits become 8."""
    pixels = _decode_fast(data, header) if header.plain else None
    if pixels is None:
        pixels = _decode_with_pillow(data, header)
    pixels = upright(pixels, header.orientation)
    if pixels.shape != (header.height, header.width, 3):
        raise ImageError(
            f"decoded to {pixels.shape[1]} x {pixels.shape[0]}, its header says {header.width} x {header.height}"
        )
    return np.ascontiguousarray(pixels)


def _decode_fast(data: bytes, header: ImageHeader) -> Pixels | None:
    """A way around Pillow, which gives the same pixels; None if there is none, or if anything is unusual."""
    if header.format == JPEG:
        jpeg = _jpeg_decoder()
        return None if jpeg is None else jpeg(data)
    return decode_png(data) if header.format == PNG else None


@functools.cache
def _jpeg_decoder() -> Callable[[bytes], Pixels | None] | None:
    """The fast way for JPEG, if simplejpeg is installed."""
    try:
        import simplejpeg
    except ImportError:
        return None

    def decode(data: bytes) -> Pixels | None:
        """None if anything is unusual: stray bytes, which are harmless, or damage. Pillow tells the two apart."""
        try:
            # The exact options cost nothing and give Pillow's and DALI's bits.
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
