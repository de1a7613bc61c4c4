"""Image headers: size and format before decoding; every damaged file is rejected with a reason."""

from __future__ import annotations

import io
import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from sopdist.data.headers import MAX_PIXELS, read_header
from sopdist.errors import ImageError
from tests.support.pictures import encoded, picture

SAVED = {
    "jpg": {"format": "JPEG"},
    "jpg progressive": {"format": "JPEG", "progressive": True},
    "jpg with comment": {"format": "JPEG", "comment": b"\xff\xd9 is no end here"},
    "png": {"format": "PNG"},
    "webp": {"format": "WEBP"},
    "webp lossless": {"format": "WEBP", "lossless": True},
    "webp extended": {"format": "WEBP", "icc_profile": b"profile" * 20},
}


@pytest.mark.parametrize("name", SAVED)
@pytest.mark.parametrize("size", [(40, 30), (1, 1), (17, 500)])
def test_size_and_format_match_pillow(name: str, size: tuple[int, int]) -> None:
    data = encoded(picture(0, *size), **SAVED[name])
    assert read_header(data) == (name.split()[0], *size, 1, True)


@pytest.mark.parametrize("name", SAVED)
def test_a_file_truncated_anywhere_is_rejected(name: str) -> None:
    data = encoded(picture(0, 24, 16), **SAVED[name])
    for length in range(len(data)):
        with pytest.raises(ImageError):
            read_header(data[:length])


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_read_and_sizes_are_upright(file_format: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x010F] = "a maker, so that orientation is not the first tag"
    exif[0x0112] = orientation
    data = encoded(picture(0, 40, 30), file_format, exif=exif)
    header = read_header(data)
    assert header.orientation == orientation
    assert (header.width, header.height) == ((40, 30) if orientation < 5 else (30, 40))


def test_images_that_decoders_may_decode_differently_are_not_plain() -> None:
    image = picture(0)
    alpha = image.convert("RGBA")
    alpha.putalpha(100)
    deep = Image.new("I;16", (20, 10), 40000)
    two = {"save_all": True, "append_images": [picture(1)]}
    odd = {
        "CMYK": encoded(image.convert("CMYK")),
        "palette": encoded(image.convert("P"), "PNG"),
        "1 bit": encoded(image.convert("1"), "PNG"),
        "16 bits": encoded(deep, "PNG"),
        "transparent PNG": encoded(alpha, "PNG"),
        "transparent WebP": encoded(alpha, "WEBP"),
        "transparent lossless WebP": encoded(alpha, "WEBP", lossless=True),
        "animated PNG": encoded(image, "PNG", **two),
        "animated WebP": encoded(image, "WEBP", **two),
    }
    for name, data in odd.items():
        header = read_header(data)
        assert not header.plain, name
        assert (header.width, header.height) == Image.open(io.BytesIO(data)).size, name
    assert read_header(encoded(image.convert("L"))).plain
    assert read_header(encoded(image.convert("L"), "PNG")).plain


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty file"),
        (encoded(picture(0), "GIF"), "GIF"),
        (encoded(picture(0), "BMP"), "BMP"),
        (b"<!DOCTYPE html>", "HTML"),
        (b"\0" * 100, "not JPEG, PNG or WebP"),
        (b"\xff\xd8\xff\xd9" + b"\0" * 9, "no frame header"),
        (b"\xff\xd8\xff\xe0\0\x04ab" + b"\0" * 9, "no marker"),
    ],
)
def test_files_that_are_not_images_are_rejected_with_a_reason(data: bytes, reason: str) -> None:
    with pytest.raises(ImageError, match=reason):
        read_header(data)


def test_a_decompression_bomb_is_rejected_by_its_header() -> None:
    png = bytearray(encoded(picture(0, 8, 8), "PNG"))
    png[16:24] = struct.pack(">II", 50_000, 50_000)
    with pytest.raises(ImageError, match="50000 x 50000 pixels, more than the 134,217,728 allowed"):
        read_header(bytes(png))
    assert MAX_PIXELS < 50_000**2
    png[16:24] = struct.pack(">II", 0, 7)
    with pytest.raises(ImageError, match="no pixels"):
        read_header(bytes(png))


@given(
    st.sampled_from([encoded(picture(1, 20, 16), **options) for options in SAVED.values()]),
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=6),
    st.binary(max_size=30),
)
@example(encoded(picture(1, 20, 16)), [(2, 0)], b"")
def test_a_damaged_file_gives_a_header_or_an_image_error(
    data: bytes, changes: list[tuple[int, int]], tail: bytes
) -> None:
    damaged = bytearray(data)
    for position, value in changes:
        damaged[position % len(damaged)] = value
    try:
        header = read_header(bytes(damaged) + tail)
    except ImageError:
        return
    assert 0 < header.width * header.height <= MAX_PIXELS
