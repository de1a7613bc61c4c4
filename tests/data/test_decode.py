"""Decoding on the CPU: pixels and crops as in Pillow, and reuse of buffers."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from sopdist.data.decode import images, pixels
from sopdist.data.decode.buffers import BufferPool
from sopdist.data.decode.images import decode_image
from sopdist.data.decode.pixels import Normalizer, crop, crop_with_pillow
from sopdist.data.decode.png import decode_png
from sopdist.data.headers import read_header
from sopdist.errors import ImageError
from tests.support.pictures import encoded, picture


def decoded(data: bytes) -> np.ndarray:
    return decode_image(data, read_header(data))


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("RGB", {"format": "JPEG"}),
        ("RGB", {"format": "JPEG", "progressive": True, "subsampling": 2}),
        ("RGB", {"format": "JPEG", "subsampling": 0}),
        ("L", {"format": "JPEG"}),
        ("CMYK", {"format": "JPEG"}),
        ("RGB", {"format": "PNG"}),
        ("L", {"format": "PNG"}),
        ("P", {"format": "PNG"}),
        ("1", {"format": "PNG"}),
        ("RGBA", {"format": "PNG"}),
        ("RGB", {"format": "WEBP"}),
        ("RGBA", {"format": "WEBP", "lossless": True}),
        ("RGB", {"format": "WEBP", "save_all": True, "append_images": [picture(5, 61, 47)]}),
    ],
)
def test_every_kind_of_file_is_decoded_to_the_pixels_of_pillow(mode: str, options: dict[str, Any]) -> None:
    data = encoded(picture(3, 61, 47).convert(mode), **options)
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    assert np.array_equal(decoded(data), expected)


def test_sixteen_bits_are_scaled_and_not_clipped() -> None:
    levels = np.linspace(0, 65535, 256).astype(np.uint16).reshape(16, 16)
    data = encoded(Image.fromarray(levels), "PNG")
    assert np.array_equal(decoded(data)[..., 0], levels >> 8)


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_with_an_exif_orientation_are_decoded_upright(file_format: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(picture(3, 61, 47), file_format, exif=exif)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert np.array_equal(decoded(data), np.asarray(expected.convert("RGB")))


def test_without_simplejpeg_pillow_gives_the_same_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(picture(3, 61, 47))
    fast = decoded(data)
    monkeypatch.setattr(images, "_jpeg_decoder", lambda: None)
    assert np.array_equal(decoded(data), fast)


def test_damaged_pixels_are_an_image_error() -> None:
    png = bytearray(encoded(picture(3), "PNG"))
    png[len(png) // 2] ^= 0xFF
    with pytest.raises(ImageError, match="damaged PNG"):
        decoded(bytes(png))
    webp = bytearray(encoded(picture(3), "WEBP"))
    webp[23:26] = b"\0\0\0"  # the start code of a key frame
    with pytest.raises(ImageError, match="damaged WebP"):
        decoded(bytes(webp))
    jpeg = encoded(picture(3))
    start = jpeg.index(b"\xff\xdb")  # a quantisation table of an impossible length
    with pytest.raises(ImageError, match="damaged JPEG"):
        decoded(jpeg[: start + 2] + b"\0\x10" + jpeg[start + 4 :])


@settings(max_examples=150)
@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from(["RGB", "L"]), st.integers(0, 4), st.integers(0, 99))
def test_ordinary_pngs_are_decoded_to_pillow_s_pixels_whatever_their_filters(
    width: int, height: int, mode: str, row_filter: int, seed: int
) -> None:
    """The file is assembled manually, so that each PNG filter occurs, and in some files a random one for each row."""
    channels = len(mode) if mode == "RGB" else 1
    draw = np.random.default_rng(seed)
    rows = b"".join(
        bytes([row_filter if seed % 3 else int(draw.integers(5))]) + draw.bytes(width * channels) for _ in range(height)
    )
    header = struct.pack(">IIBBBBB", width, height, 8, 2 if mode == "RGB" else 0, 0, 0, 0)
    packed = zlib.compress(rows)
    parts = [(b"IHDR", header), (b"IDAT", packed[:7]), (b"IDAT", packed[7:]), (b"IEND", b"")]
    png = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in parts
    )
    found = decode_png(png)
    assert found is not None
    assert np.array_equal(found, np.asarray(Image.open(io.BytesIO(png)).convert("RGB")))


def test_unusual_pngs_are_left_to_pillow() -> None:
    image = picture(3, 20, 16)
    assert decode_png(encoded(image.convert("P"), "PNG")) is None
    assert decode_png(encoded(image.convert("RGBA"), "PNG")) is None
    intact = encoded(image, "PNG")
    assert decode_png(intact) is not None
    for offset in range(8, len(intact)):
        damaged = bytearray(intact)
        damaged[offset] ^= 0x55
        found = decode_png(bytes(damaged))
        assert found is None or np.array_equal(found, np.asarray(image)), f"byte {offset}: wrong pixels"


def damaged_jpeg() -> bytes:
    """A JPEG with intact start and end, and damage in between."""
    jpeg = bytearray(encoded(picture(3, 200, 160), quality=90))
    for offset in range(len(jpeg) // 4, len(jpeg) - 2, 37):
        jpeg[offset] ^= 0xFF
    return bytes(jpeg)


def test_both_jpeg_decoders_agree_on_which_files_are_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ImageError, match="damaged JPEG"):
        decoded(damaged_jpeg())
    jpeg = encoded(picture(3))
    stray = jpeg[:2] + b"\xff\xfe\0\x06abcd" + jpeg[2:] + b"trailing bytes"
    usual = decoded(stray)
    monkeypatch.setattr(images, "_jpeg_decoder", lambda: None)
    assert np.array_equal(decoded(stray), usual)
    with pytest.raises(ImageError, match="damaged JPEG"):
        decoded(damaged_jpeg())


sides = st.integers(1, 80)


@settings(max_examples=300)
@given(sides, sides, st.integers(-9, 70), st.integers(-9, 70), sides, sides, st.booleans(), sides, st.integers(0, 9))
def test_crops_of_the_c_code_are_bit_identical_to_those_of_pillow(
    width: int, height: int, x: int, y: int, box_width: int, box_height: int, mirror: bool, side: int, seed: int
) -> None:
    assert pixels.is_built(), "`make env` compiles it"
    image = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    box = np.array([x, y, box_width, box_height], dtype=np.int32)
    in_c, in_pillow = np.empty((2, side, side, 3), np.uint8)
    crop(image, box, mirror, in_c)
    crop_with_pillow(image, box, mirror, in_pillow)
    assert np.array_equal(in_c, in_pillow)


def test_a_crop_without_resize_is_a_copy_and_black_outside_the_image() -> None:
    image = np.random.default_rng(0).integers(1, 256, (10, 12, 3), dtype=np.uint8)
    to = np.empty((8, 8, 3), np.uint8)
    crop(image, np.array([-3, 4, 8, 8], np.int32), False, to)
    assert (to[:, :3] == 0).all()
    assert (to[6:] == 0).all()
    assert np.array_equal(to[:6, 3:], image[4:, :5])
    crop(image, np.array([2, 1, 8, 8], np.int32), True, to)
    assert np.array_equal(to, image[1:9, 2:10][:, ::-1])


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40), st.integers(0, 255))
def test_resizing_keeps_a_constant_colour_and_stays_within_the_range_of_the_pixels(
    width: int, height: int, side: int, level: int
) -> None:
    to = np.empty((side, side, 3), np.uint8)
    full = np.array([0, 0, width, height], np.int32)
    crop(np.full((height, width, 3), level, np.uint8), full, False, to)
    assert (to == level).all()
    image = np.random.default_rng(level).integers(50, 201, (height, width, 3), dtype=np.uint8)
    crop(image, full, False, to)
    assert image.min() <= to.min() <= to.max() <= image.max()


def test_normalised_pixels_have_the_same_bits_in_c_numpy_and_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    image = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)  # 35 pixels: not a multiple of 8
    normalize = Normalizer((0.1, 0.5, 0.9), (0.2, 0.25, 0.3))
    in_c, in_numpy = np.empty((2, 5, 7, 3), np.float32)
    normalize(image, in_c)
    monkeypatch.setattr(pixels, "_library", lambda: None)
    normalize(image, in_numpy)
    assert np.array_equal(in_c, in_numpy)
    assert np.array_equal(in_c, normalize.tensor(torch.from_numpy(image)).numpy())
    exact = (image / 255.0 - [0.1, 0.5, 0.9]) / [0.2, 0.25, 0.3]
    assert np.abs(in_c - exact).max() < 1e-5


def test_a_buffer_is_reused_only_when_it_is_no_longer_referenced() -> None:
    pool = BufferPool()
    tensor = torch.from_numpy(pool.take((4, 3), np.float32)).permute(1, 0)
    address = tensor.data_ptr()
    assert pool.take((4, 3), np.float32).ctypes.data != address, "a view of it is still alive"
    part = tensor[:1]
    del tensor
    assert pool.take((4, 3), np.float32).ctypes.data != address, "a part of it is still alive"
    del part
    addresses = {pool.take((4, 3), np.float32).ctypes.data for _ in range(3)}
    assert len(addresses) == 1
    assert pool.held_bytes() == 2 * 48


def test_buffers_of_shapes_that_are_no_longer_used_are_freed() -> None:
    pool = BufferPool(max_free=2)
    for length in range(1, 20):
        pool.take((length,), np.uint8)
    assert pool.held_bytes() <= 17 + 18 + 19
    held = [pool.take((100,), np.uint8) for _ in range(30)]
    assert pool.held_bytes() >= 3000
    del held
    pool.take((100,), np.uint8)
    assert pool.held_bytes() <= 300, "buffers of batches that were released are freed"
