"""Images for a shard: kept byte for byte, shrunk, converted, or rejected with a reason."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import pytest
from PIL import Image

from sopdist.data.decode.images import decode_image
from sopdist.data.headers import FORMATS, MAX_PIXELS, read_header
from sopdist.data.prepare.reencode import encode_for_shard, strict_pillow
from sopdist.errors import ImageError

from ..support.pictures import encoded, picture

WIDE = picture(1, 120, 80)
ORIENTATION = 0x0112


@pytest.fixture(autouse=True)
def strict() -> Iterator[None]:
    with strict_pillow():
        yield


def decoded(content: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(content))
    image.load()
    return image


def difference(image: Image.Image, expected: Image.Image) -> float:
    """Mean absolute difference over all pixels and channels, on a scale of 255."""
    assert image.size == expected.size
    assert image.mode == "RGB"
    return float(np.abs(np.asarray(image).astype(int) - np.asarray(expected.convert("RGB")).astype(int)).mean())


def bomb(content: bytes, at: int, kind: str, width: int, height: int) -> bytes:
    """The same file, with another image size in its header."""
    size = struct.pack(kind, width, height)
    return content[:at] + size + content[at + len(size) :]


@pytest.mark.parametrize(
    ("content", "extension"),
    [
        (encoded(WIDE, "JPEG"), "jpg"),
        (encoded(WIDE, "JPEG", progressive=True), "jpg"),
        (encoded(WIDE.convert("CMYK"), "JPEG"), "jpg"),
        (encoded(WIDE.convert("L"), "PNG"), "png"),
        (encoded(WIDE.convert("P"), "PNG"), "png"),
        (encoded(Image.fromarray(np.arange(600, dtype=np.uint16).reshape(20, 30)), "PNG"), "png"),
        (encoded(WIDE, "WEBP"), "webp"),
        (encoded(WIDE, "WEBP", save_all=True, append_images=[picture(2, 120, 80)]), "webp"),
    ],
    ids=["jpeg", "progressive", "cmyk", "grey", "palette", "16 bit", "webp", "animated webp"],
)
def test_supported_formats_are_stored_byte_for_byte(content: bytes, extension: str) -> None:
    assert encode_for_shard(content) == (extension, content)
    assert encode_for_shard(content, short_side=80) == (extension, content)  # small enough: never decoded


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_a_resized_image_has_the_requested_short_side_and_the_same_content(format: str) -> None:  # noqa: A002
    wide, tall = picture(3, 300, 200), picture(4, 201, 500)
    for image, size in ((wide, (60, 40)), (tall, (40, round(500 * 40 / 201)))):
        result = encode_for_shard(encoded(image, format), short_side=40)
        assert result.format == "jpg"
        small = decoded(result.content)
        assert small.format == "JPEG"
        dither = 9 if format == "GIF" else 3
        assert difference(small, image.resize(size, Image.Resampling.BOX)) < dither


def test_images_are_never_enlarged_and_keep_at_least_the_short_side() -> None:
    content = encoded(picture(0, 30, 20))
    assert encode_for_shard(content, short_side=64).content == content
    converted = encode_for_shard(encoded(picture(0, 30, 20), "BMP"), short_side=64)
    assert converted.format == "jpg"
    assert decoded(converted.content).size == (30, 20)
    assert decoded(encode_for_shard(encoded(picture(0, 4000, 3)), short_side=2).content).size == (2667, 2)


def test_a_photo_that_can_be_stored_can_also_be_shrunk() -> None:
    """110 megapixels: more than Pillow's own limit, less than ours."""
    content = encoded(Image.new("L", (11_000, 10_000), 99))
    assert encode_for_shard(content) == ("jpg", content)
    assert decoded(encode_for_shard(content, short_side=50).content).size == (55, 50)


def test_the_pixel_limit_of_pillow_is_restored() -> None:
    before = Image.MAX_IMAGE_PIXELS
    Image.MAX_IMAGE_PIXELS = 77
    try:
        with strict_pillow():
            assert Image.MAX_IMAGE_PIXELS == MAX_PIXELS
        assert Image.MAX_IMAGE_PIXELS == 77
    finally:
        Image.MAX_IMAGE_PIXELS = before


def test_shrinking_decodes_images_as_training_does() -> None:
    deep = (np.arange(4800, dtype=np.uint16) * 13).reshape(60, 80)
    exif = Image.Exif()
    for orientation in range(1, 9):
        exif[ORIENTATION] = orientation
        content = encoded(Image.fromarray(deep), "PNG", exif=exif)
        trained = Image.fromarray(decode_image(content, read_header(content)))
        shrunk = decoded(encode_for_shard(content, short_side=59).content)
        assert difference(shrunk, trained.resize(shrunk.size, Image.Resampling.BICUBIC)) < 2


def test_the_requested_quality_is_used() -> None:
    content = encoded(picture(0, 300, 200))
    small, large = (encode_for_shard(content, 100, quality).content for quality in (20, 95))
    assert len(small) < len(large) / 2
    assert encode_for_shard(content, 100).content == large


@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_rotated_by_exif_is_stored_upright(orientation: int) -> None:
    upright = picture(5, 120, 80)
    stored = {
        1: upright,
        2: upright.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
        3: upright.rotate(180),
        4: upright.transpose(Image.Transpose.FLIP_TOP_BOTTOM),
        5: upright.transpose(Image.Transpose.TRANSPOSE),
        6: upright.rotate(90, expand=True),  # displayed after a clockwise rotation by 90 degrees
        7: upright.transpose(Image.Transpose.TRANSVERSE),
        8: upright.rotate(-90, expand=True),
    }[orientation]
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    for format_ in ("JPEG", "PNG", "WEBP", "TIFF"):
        content = encoded(stored, format_, exif=exif)
        result = decoded(encode_for_shard(content, short_side=40).content)
        assert difference(result, upright.resize((60, 40), Image.Resampling.BOX)) < 4, format_
        assert result.getexif().get(ORIENTATION, 1) == 1


def test_unusual_colour_modes_become_the_rgb_that_training_sees() -> None:
    expected = WIDE.resize((60, 40), Image.Resampling.BOX)
    for content in (
        encoded(WIDE.convert("CMYK"), "JPEG", quality=95),
        encoded(WIDE.quantize(256, dither=Image.Dither.NONE), "PNG"),
        encoded(WIDE.convert("RGBA"), "PNG"),
        encoded(WIDE.convert("CMYK"), "TIFF"),
        encoded(WIDE, "WEBP", lossless=True, save_all=True, append_images=[picture(2, 120, 80)]),
    ):
        assert difference(decoded(encode_for_shard(content, short_side=40).content), expected) < 5
    deep = (np.asarray(WIDE.convert("L")).astype(np.uint16) << 8) + 77  # 16 bits per pixel
    for format_ in ("PNG", "TIFF"):
        small = decoded(encode_for_shard(encoded(Image.fromarray(deep), format_), short_side=40).content)
        assert difference(small, expected.convert("L")) < 3


@pytest.mark.parametrize(
    ("image", "format"),
    [
        (picture(6, 9, 7), "BMP"),
        (picture(6, 9, 7), "TIFF"),
        (picture(6, 9, 7).convert("L"), "GIF"),
        (picture(6, 9, 7).convert("P"), "GIF"),
        (picture(6, 9, 7).convert("1"), "TIFF"),
        (Image.fromarray(np.arange(63, dtype=np.uint16).reshape(7, 9) * 1000), "TIFF"),
    ],
    ids=["bmp", "tiff", "grey gif", "gif", "1 bit", "16 bit"],
)
def test_other_formats_are_converted_to_png_losslessly(image: Image.Image, format: str) -> None:  # noqa: A002
    result = encode_for_shard(encoded(image, format))
    assert result.format == "png"
    png = decoded(result.content)
    assert png.format == "PNG"
    rgb = [np.asarray(one if one.mode.startswith("I") else one.convert("RGB")) for one in (png, image)]
    np.testing.assert_array_equal(*rgb)


def test_the_first_frame_of_an_animation_is_used() -> None:
    frames = [Image.new("RGB", (20, 20), colour) for colour in ("red", "green", "blue")]
    content = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    for short_side in (None, 10):
        result = decoded(encode_for_shard(content, short_side).content).convert("RGB")
        assert difference(result, Image.new("RGB", result.size, "red")) < 3


@pytest.mark.parametrize("short_side", [None, 20])
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty file"),
        (b"<html>404 Not Found</html>", "HTML"),
        (b"BM, this is a text", "cannot be decoded"),
        (b"%PDF-1.4 and so on", "not JPEG, PNG or WebP"),
        (encoded(WIDE)[:-500], "truncated"),
        (encoded(WIDE)[:20], "truncated"),
        (encoded(WIDE, "PNG")[:-500], "truncated"),
        (encoded(WIDE, "WEBP")[:-500], "truncated"),
        (encoded(WIDE, "GIF")[:-2000], "cannot be decoded"),
        (encoded(WIDE, "BMP")[:-2000], "cannot be decoded"),
        (encoded(WIDE, "TIFF")[:-2000], "cannot be decoded"),
        (bomb(encoded(WIDE, "PNG"), 16, ">II", 100_000, 100_000), "100000 x 100000 pixels"),
        (bomb(encoded(WIDE, "GIF"), 6, "<HH", 60_000, 60_000), "134,217,728 pixels allowed"),
        (bomb(encoded(WIDE, "GIF"), 6, "<HH", 12_000, 12_000), "134,217,728 pixels allowed"),  # it would only warn
        (bomb(encoded(WIDE, "BMP"), 18, "<ii", 50_000, 50_000), "134,217,728 pixels allowed"),
        (encoded(Image.fromarray(np.ones((30, 30), np.float32)), "TIFF"), "floating-point"),
    ],
    ids=[
        "empty", "html", "text", "pdf", "jpeg cut", "jpeg header cut", "png cut", "webp cut", "gif cut", "bmp cut",
        "tiff cut", "png bomb", "gif bomb", "gif small bomb", "bmp bomb", "float",
    ],
)  # fmt: skip
def test_unusable_images_are_rejected_with_a_reason(content: bytes, reason: str, short_side: int | None) -> None:
    with pytest.raises(ImageError, match=reason):
        encode_for_shard(content, short_side)


def test_damage_inside_an_image_is_found_when_it_is_decoded() -> None:
    """The middle of the file is missing: the header looks fine, and decoding raises ImageError."""
    png = encoded(picture(7, 200, 100), "PNG")
    damaged = png[: len(png) // 3] + png[2 * len(png) // 3 :]
    assert encode_for_shard(damaged).content == damaged
    with pytest.raises(ImageError, match="cannot be decoded"):
        encode_for_shard(damaged, short_side=50)


def test_random_damage_gives_an_image_or_an_image_error() -> None:
    draw = np.random.default_rng(0)
    for format_ in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"):
        content = np.frombuffer(encoded(picture(8, 60, 50), format_), np.uint8)
        for _ in range(60):
            broken = content.copy()
            positions = draw.integers(0, min(len(content), 400), size=draw.integers(1, 8))
            broken[positions] = draw.integers(0, 256, len(positions))
            with suppress(ImageError):
                assert encode_for_shard(broken.tobytes(), short_side=20).format in FORMATS
