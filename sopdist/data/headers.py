"""Image headers: format, size and orientation of an encoded image, and whether the file is complete.

Crops are chosen before decoding, so both decoders need the same size in advance. Harmful files are also rejected here:
files that are not images, truncated files, and images so large that decoding them would exhaust memory. This module
parses bytes and is independent of the decoders.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from ..errors import ImageError

MAX_PIXELS = 1 << 27  # 134 million: more than common cameras have; 400 MB when decoded

JPEG, PNG, WEBP = "jpg", "png", "webp"
FORMATS = (JPEG, PNG, WEBP)

_EXIF_ORIENTATION = 0x0112
_UPRIGHT = 1


class ImageHeader(NamedTuple):
    """Properties of an encoded image."""

    format: str  # one of FORMATS, which are also the extensions in a shard
    width: int  # upright, i.e. after undoing `orientation`
    height: int
    orientation: int  # EXIF: 1 is upright, 2 to 8 are rotated or mirrored
    plain: bool  # a single frame of 8-bit grey or RGB, which all decoders decode to the same pixels


def read_header(data: bytes, max_pixels: int = MAX_PIXELS) -> ImageHeader:
    """Parse the header; raises ImageError with the reason if the image cannot be used."""
    try:
        if data[:3] == b"\xff\xd8\xff":
            header = _jpeg(data)
        elif data[:8] == b"\x89PNG\r\n\x1a\n":
            header = _png(data)
        elif data[:4] == b"RIFF" and data[8:12] == b"WEBP":
            header = _webp(data)
        else:
            raise ImageError(_not_an_image(data))
    except (struct.error, IndexError):
        raise ImageError("truncated header") from None
    if header.width < 1 or header.height < 1:
        raise ImageError(f"has no pixels ({header.width} x {header.height})")
    if header.width * header.height > max_pixels:
        raise ImageError(f"{header.width} x {header.height} pixels, more than the {max_pixels:,} allowed")
    if header.orientation >= 5:  # rotated by 90 degrees: the stored width is the upright height
        return header._replace(width=header.height, height=header.width)
    return header


def _not_an_image(data: bytes) -> str:
    if not data:
        return "empty file"
    for magic, name in (
        (b"GIF8", "GIF"),
        (b"BM", "BMP"),
        (b"II*\0", "TIFF"),
        (b"MM\0*", "TIFF"),
        (b"<", "HTML or XML"),
    ):
        if data.startswith(magic):
            return f"{name}, not JPEG, PNG or WebP"
    return f"not JPEG, PNG or WebP (starts with {data[:4].hex(' ')})"


def _jpeg(data: bytes) -> ImageHeader:
    """Walk the segments up to the frame header (SOF)."""
    orientation = _UPRIGHT
    at = 2
    while True:
        if data[at] != 0xFF:
            raise ImageError("damaged JPEG: no marker where one is expected")
        while data[at] == 0xFF:  # any number of fill bytes may precede a marker
            at += 1
        marker = data[at]
        (length,) = struct.unpack_from(">H", data, at + 1)
        body = at + 3
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            precision, height, width, components = struct.unpack_from(">BHHB", data, body)
            break
        if marker in (0xD9, 0xDA) or length < 2:
            raise ImageError("damaged JPEG: no frame header")
        if marker == 0xE1 and data[body : body + 6] == b"Exif\0\0":
            orientation = _exif_orientation(data[body + 6 : body + length - 2]) or orientation
        at = body + length - 2
    # Inside compressed data, FF is always followed by 00, so FF D9 after the frame header is the real end marker.
    if data.rfind(b"\xff\xd9", body) < 0:
        raise ImageError("truncated JPEG: no end marker")
    plain = marker in (0xC0, 0xC1, 0xC2) and precision == 8 and components in (1, 3)
    return ImageHeader(JPEG, width, height, orientation, plain)


def _png(data: bytes) -> ImageHeader:
    """Walk the chunks up to the pixels (IDAT)."""
    width, height, depth, colour = struct.unpack_from(">IIBB", data, 16)
    orientation, plain = _UPRIGHT, depth == 8 and colour in (0, 2)
    at = 8
    while True:
        length, kind = struct.unpack_from(">I4s", data, at)
        if kind == b"IDAT":
            break
        if kind in (b"tRNS", b"acTL"):  # transparency, animation
            plain = False
        elif kind == b"eXIf":
            orientation = _exif_orientation(data[at + 8 : at + 8 + length]) or orientation
        at += 12 + length
    end = data.rfind(b"IEND", at)
    if end < 0 or end + 8 > len(data):  # the chunk type is followed by a checksum
        raise ImageError("truncated PNG: no end chunk")
    return ImageHeader(PNG, width, height, orientation, plain)


def _webp(data: bytes) -> ImageHeader:
    """The first chunk contains the size; an extended file may have EXIF in a later chunk."""
    (riff_size,) = struct.unpack_from("<I", data, 4)
    if riff_size + 8 > len(data):
        raise ImageError(f"truncated WebP: {len(data)} of {riff_size + 8} bytes")
    kind = data[12:16]
    orientation, plain = _UPRIGHT, True
    if kind == b"VP8 ":
        width, height = (side & 0x3FFF for side in struct.unpack_from("<HH", data, 26))
    elif kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        width, height, plain = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1, not bits >> 28 & 1
    elif kind == b"VP8X":
        flags = data[20]
        width = int.from_bytes(data[24:27], "little") + 1
        height = int.from_bytes(data[27:30], "little") + 1
        plain = not flags & 0x12  # alpha, animation
        if flags & 0x08:
            orientation = _exif_orientation(_webp_chunk(data, b"EXIF")) or orientation
    else:
        raise ImageError(f"damaged WebP: unknown chunk {kind!r}")
    return ImageHeader(WEBP, width, height, orientation, plain)


def _webp_chunk(data: bytes, wanted: bytes) -> bytes:
    at = 12
    while at + 8 <= len(data):
        kind, length = struct.unpack_from("<4sI", data, at)
        if kind == wanted:
            return data[at + 8 : at + 8 + length].removeprefix(b"Exif\0\0")
        at += 8 + length + length % 2
    return b""


def _exif_orientation(tiff: bytes) -> int | None:
    """Orientation in a TIFF block, or None if there is none or the block is damaged: the image is still usable."""
    order = {b"II": "<", b"MM": ">"}.get(tiff[:2])
    if order is None:
        return None
    try:
        (at,) = struct.unpack_from(order + "I", tiff, 4)
        (entries,) = struct.unpack_from(order + "H", tiff, at)
        for entry in range(entries):
            tag, kind, _, value = struct.unpack_from(order + "HHIH", tiff, at + 2 + 12 * entry)
            if tag == _EXIF_ORIENTATION:
                return value if kind == 3 and 1 <= value <= 8 else None
    except struct.error:
        pass
    return None
