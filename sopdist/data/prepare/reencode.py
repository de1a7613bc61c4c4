"""Conversion of an image for a shard: copied byte for byte if possible, otherwise decoded and encoded again.

Independent of the image's source. Errors that Pillow raises for damaged or malicious files become ImageError here.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from ...errors import ImageError
from ..headers import JPEG, MAX_PIXELS, PNG, ImageHeader, read_header

QUALITY = 95

# Only common photo formats: for some others, Pillow's decoders start external programs.
_STORED = ("JPEG", "PNG", "WEBP")
_CONVERTED = ("GIF", "BMP", "TIFF")
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")  # modes that PNG stores losslessly
_PNG_LEVEL = 6  # explicit, so that the bytes do not depend on Pillow's default


class Encoded(NamedTuple):
    """An encoded image, ready for a shard."""

    format: str  # one of headers.FORMATS
    content: bytes


def encode_for_shard(content: bytes, short_side: int | None = None, quality: int = QUALITY) -> Encoded:
    """Keep JPEG, PNG and WebP as they are and convert GIF, BMP and TIFF to PNG; shrink to `short_side` as JPEG.

    Images that are already small enough are never decoded. Raises ImageError with the reason if an image cannot be
    used. Call it inside `strict_pillow`, which sets the limits.
    """
    try:
        header = read_header(content)
    except ImageError as reason:
        return _convert(content, reason, short_side, quality)
    if short_side is None or min(header.width, header.height) <= short_side:
        return Encoded(header.format, content)
    return Encoded(JPEG, _shrink(content, header, short_side, quality))


def encode_png(image: Image.Image) -> bytes:
    """Encode as PNG; the same pixels always give the same bytes."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=_PNG_LEVEL)
    return buffer.getvalue()


@contextmanager
def strict_pillow() -> Iterator[None]:
    """Apply our pixel limit to Pillow, and hide its warnings, which do not name the file.

    The limit and the warning filters are global to the process: enter this once, before starting threads that decode.
    """
    limit = Image.MAX_IMAGE_PIXELS
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"PIL\.")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        Image.MAX_IMAGE_PIXELS = MAX_PIXELS
        try:
            yield
        finally:
            Image.MAX_IMAGE_PIXELS = limit


def _shrink(content: bytes, header: ImageHeader, short_side: int, quality: int) -> bytes:
    from ..decode.images import to_rgb, upright  # imported here, because it imports torch, which most runs do not need

    with _decoding(), Image.open(io.BytesIO(content), formats=_STORED) as image:
        width, height = _shrunk(image.size, short_side)
        # A JPEG decoder downscales by powers of two at almost no cost. Stop at twice the final size, and leave the rest
        # to the better filter.
        image.draft(None, (2 * width, 2 * height))
        rgb = to_rgb(image).resize((width, height), Image.Resampling.BICUBIC)
        # Use our own header parser, as the training decoders do; Pillow also honours XMP.
        return _encode_jpeg(Image.fromarray(upright(np.asarray(rgb), header.orientation)), quality)


def _convert(content: bytes, reason: ImageError, short_side: int | None, quality: int) -> Encoded:
    """Convert the first frame of a GIF, BMP or TIFF; for all other files, raise `reason`, the error of the header."""
    from ..decode.images import to_rgb

    with _decoding(), _open_other(content, reason) as opened:
        image = ImageOps.exif_transpose(opened)
        if short_side is None:
            return Encoded(PNG, encode_png(image if image.mode in _PNG_MODES else to_rgb(image)))
        rgb = to_rgb(image)
        if min(rgb.size) > short_side:
            rgb = rgb.resize(_shrunk(rgb.size, short_side), Image.Resampling.BICUBIC)
        return Encoded(JPEG, _encode_jpeg(rgb, quality))


def _open_other(content: bytes, reason: ImageError) -> Image.Image:
    try:
        return Image.open(io.BytesIO(content), formats=_CONVERTED)
    except UnidentifiedImageError:
        raise reason from None


def _shrunk(size: tuple[int, int], short_side: int) -> tuple[int, int]:
    """(640, 480) with short side 256 -> (341, 256)."""
    scale = short_side / min(size)
    width, height = (max(short_side, round(side * scale)) for side in size)
    return width, height


def _encode_jpeg(rgb: Image.Image, quality: int) -> bytes:
    buffer = io.BytesIO()
    rgb.save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


@contextmanager
def _decoding() -> Iterator[None]:
    try:
        yield
    except (ImageError, MemoryError):
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise ImageError(f"more than the {Image.MAX_IMAGE_PIXELS:,} pixels allowed") from None
    except Exception as error:  # damaged files make decoders raise nearly anything
        raise ImageError(f"cannot be decoded: {error}") from None
