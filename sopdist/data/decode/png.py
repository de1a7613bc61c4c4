"""Decodes ordinary PNGs without Pillow, whose overhead dominates for small images.

Unusual files are left to Pillow, which also describes what is wrong with them.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np

from .pixels import Pixels, unfilter

_CHANNELS = {0: 1, 2: 3}  # colour types: grey, RGB


def decode_png(data: bytes) -> Pixels | None:
    """Decode 8-bit grey or RGB to (height, width, 3). None for other kinds, damaged files, or without the C code."""
    try:
        width, height, depth, colour, _, _, interlace = struct.unpack_from(">IIBBBBB", data, 16)
        if depth != 8 or colour not in _CHANNELS or interlace:
            return None
        parts, at = [], 8
        while (chunk := struct.unpack_from(">I4s", data, at))[1] != b"IEND":
            length, kind = chunk
            if kind == b"IDAT":
                body = data[at + 4 : at + 8 + length]
                if zlib.crc32(body) != struct.unpack_from(">I", data, at + 8 + length)[0]:
                    return None
                parts.append(body[4:])
            elif kind not in (b"IHDR", b"PLTE") and kind[0] < ord("a"):  # a critical chunk, which must not be skipped
                return None
            at += 12 + length
        channels = _CHANNELS[colour]
        expected = height * (1 + width * channels)
        raw = zlib.decompressobj().decompress(b"".join(parts), expected + 1)
    except (struct.error, zlib.error):
        return None
    if len(raw) != expected:
        return None
    return unfilter(np.frombuffer(bytearray(raw), np.uint8), height, width, channels)
