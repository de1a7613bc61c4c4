"""An image as it goes into a shard: byte for byte where possible, otherwise decoded and encoded again.

Nothing here knows where an image comes from. What Pillow does with damaged or hostile bytes ends here as an ImageError.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from ..errors import ImageError
from ..headers import JPEG, MAX_PIXELS, PNG, ImageHeader, read_header

QUALITY = 95

# Only formats that are met as photographs, and no others: Pillow knows some whose decoders start other programs.
_STORED = ("JPEG", "PNG", "WEBP")
_CONVERTED = ("GIF", "BMP", "TIFF")
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")  # what a PNG holds without loss
_PNG_LEVEL = 6  # named, so that another default of Pillow changes nothing
_UNDO_ORIENTATION = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class Encoded(NamedTuple):
    """An image that can go into a shard."""

    format: str  # one of headers.FORMATS
    content: bytes


def fit_for_shard(content: bytes, short_side: int | None = None, quality: int = QUALITY) -> Encoded:
    """JPEG, PNG and WebP as they are, GIF, BMP and TIFF as PNG; with `short_side` as JPEG of at most that size.

    ImageError says why an image cannot be used. What is small enough already is never decoded.
    """
    try:
        header = read_header(content)
    except ImageError as reason:
        return _convert(content, reason, short_side, quality)
    if short_side is None or min(header.width, header.height) <= short_side:
        return Encoded(header.format, content)
    return Encoded(JPEG, _shrink(content, header, short_side, quality))


def to_rgb(image: Image.Image) -> Image.Image:
    """8-bit RGB as the decoders of training see it: transparency is dropped, 16-bit grey keeps its upper byte."""
    if image.mode == "F":
        raise ImageError("floating-point pixels, whose range is not known")
    if image.mode.startswith("I"):  # Pillow's own conversion would cut everything above 255
        grey = np.clip(np.asarray(image).astype(np.int64) >> 8, 0, 255).astype(np.uint8)
        return Image.fromarray(grey).convert("RGB")
    return image.convert("RGB")


def encode_png(image: Image.Image) -> bytes:
    """The image as PNG; the same pixels give the same bytes."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=_PNG_LEVEL)
    return buffer.getvalue()


@contextmanager
def strict_pillow() -> Iterator[None]:
    """Pillow's warning of decompression bombs becomes an error, and its others, which name no file, are not shown.

    Warning filters belong to the whole process: enter this once, before threads start that decode.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"PIL\.")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield


def _shrink(content: bytes, header: ImageHeader, short_side: int, quality: int) -> bytes:
    with _decoding(), Image.open(io.BytesIO(content), formats=_STORED) as image:
        width, height = _shrunk(image.size, short_side)
        # A JPEG decoder halves at next to no cost. Stop at twice the final size: the rest is for the better filter.
        image.draft(None, (2 * width, 2 * height))
        rgb = to_rgb(image).resize((width, height), Image.Resampling.BICUBIC)
        # By our own reading of the header, which the decoders of training share; Pillow also believes XMP.
        if header.orientation in _UNDO_ORIENTATION:
            rgb = rgb.transpose(_UNDO_ORIENTATION[header.orientation])
        return _encode_jpeg(rgb, quality)


def _convert(content: bytes, reason: ImageError, short_side: int | None, quality: int) -> Encoded:
    """GIF, BMP or TIFF, first frame; for all others `reason`, why the header was refused, stands."""
    with _decoding(), _open_other(content, reason) as opened:
        if opened.width * opened.height > MAX_PIXELS:
            raise ImageError(f"{opened.width} x {opened.height} pixels, more than the {MAX_PIXELS:,} allowed")
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
        raise ImageError(f"more than the {Image.MAX_IMAGE_PIXELS:,} pixels that Pillow decodes") from None
    except Exception as error:  # damaged bytes make a decoder raise nearly anything
        raise ImageError(f"cannot be decoded: {error}") from None
