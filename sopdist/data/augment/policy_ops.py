"""The operations of the strong view, for batches of uint8 images (n, H, W, 3) on any device.

They are defined as in Pillow and form three families. Within a family, each operation computes its own parameters (a
table, a faded image, a matrix), and one kernel then processes all samples of the family together:

    family   operation      weakest .. strongest                         Pillow
    POINT    autocontrast   -                                            ImageOps.autocontrast
    a table  equalize       -                                            ImageOps.equalize
    of 256   invert         -                                            ImageOps.invert
    levels   posterize      4 .. 1 bits                                  ImageOps.posterize
             solarize       inverts levels at or above 256 .. 1          ImageOps.solarize
             contrast       factor 1 .. 0.1 (minus) or 1.9 (plus)        ImageEnhance.Contrast
             brightness     the same                                     ImageEnhance.Brightness
    BLEND    color          the same                                     ImageEnhance.Color
             sharpness      the same                                     ImageEnhance.Sharpness
    AFFINE   rotate         0 .. 30 degrees, in either direction         Image.rotate, nearest neighbour
             shear_x, _y    0 .. 0.3 about the top left corner           Image.transform(AFFINE), nearest neighbour
             translate_x,_y 0 .. 10/32 of the side, in whole pixels      Image.transform(AFFINE), nearest neighbour

Bits: every operation is bit-identical to Pillow 13 on x86-64. On other processors, Pillow's compiler may fuse a
multiplication with an addition; contrast, brightness, color and sharpness may then differ from it by one level. The
results here do not vary: all arithmetic is on integers or in single IEEE operations, sample by sample, so that a result
depends neither on the device nor on the other samples of the batch. (A compiler that fuses these operations would break
this: run them eagerly.)

The ranges are those of UDA's public code. This file draws no random numbers: each sample comes with an `amount` in
(-1, 1), where 0 is the weakest; operations without a direction use its absolute value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

Parts = Sequence[tuple[str, list[float]]]  # a batch grouped by operation, in order: operation, amount of each sample
Matrix = tuple[float, float, float, float, float, float]  # maps (x, y) of the result to its source; Pillow's order

MAX_SIDE = 16384  # beyond this, the fixed-point coordinates of `warp` would overflow 32 bits

_POSTERIZE_BITS = 4
_ENHANCE = 0.9
_DEGREES = 30.0
_SHEAR = 0.3
_TRANSLATE = 10 / 32
_ONE = 65536  # 1.0 in 16.16 fixed point


def point(pixels: Tensor, parts: Parts) -> Tensor:
    """Map each level of each channel through its sample's table."""
    tables = []
    for group, (name, amounts) in _groups(pixels, parts):
        table = POINT[name](group, _to_device(amounts, torch.float64, pixels.device))
        tables.append(table.expand(len(group), 3, 256))
    index = _level_index(pixels, torch.int32)
    return torch.cat(tables).flatten().index_select(0, index.flatten()).view_as(pixels)


def blend(pixels: Tensor, parts: Parts) -> Tensor:
    """Interpolate from a faded version of each image (factor 0) to the image (factor 1), or extrapolate beyond it."""
    faded = torch.cat([BLEND[name](group) for group, (name, _) in _groups(pixels, parts)])
    amount = _to_device([a for _, amounts in parts for a in amounts], torch.float64, pixels.device)
    return _blend(faded, pixels, _factor(amount)[:, None, None, None])


def warp(pixels: Tensor, parts: Parts, fill: tuple[int, int, int]) -> Tensor:
    """Apply one affine matrix per sample, nearest neighbour. Pixels from outside the image get the colour `fill`."""
    n, height, width, _ = pixels.shape
    device = pixels.device
    # One sample at a time on the host: vectorised sines round differently depending on the position in the vector.
    matrices = [_fixed_point(AFFINE[name](a, height, width)) for name, amounts in parts for a in amounts]
    coefficients = _to_device(matrices, torch.int32, device)
    xx, xy, x0, yx, yy, y0 = coefficients[:, :, None, None].unbind(1)  # each (n, 1, 1)

    # Frame the image with one pixel of `fill`, so that it suffices to clamp coordinates outside the image.
    framed = _row_of(fill, width + 2, device).repeat(n, height + 2, 1)  # (n, H + 2, 3 (W + 2))
    framed[:, 1:-1, 3:-3] = pixels.flatten(2)

    x = torch.arange(width, dtype=torch.int32, device=device)
    y = torch.arange(height, dtype=torch.int32, device=device)[:, None]
    column = ((x0 + xy * y) + xx * x).bitwise_right_shift_(16).clamp_(-1, width)  # (n, H, W)
    row = ((y0 + yy * y) + yx * x).bitwise_right_shift_(16).clamp_(-1, height)  # (n, H, W)
    first = torch.arange(n, device=device)[:, None, None] * ((height + 2) * (width + 2)) + (width + 3)
    index = (row.mul_(width + 2).add_(column) + first).flatten()  # of pixels in all framed images
    return framed.view(-1, 3).index_select(0, index).view_as(pixels)


def cut_out(images: Tensor, centers: list[list[int]], side: int, fill: tuple[int, int, int]) -> None:
    """Fill a square around each centre (x, y), clipped to the image, with the colour `fill`, in place."""
    _, height, width, _ = images.shape
    device = images.device
    corner = _to_device(centers, torch.int64, device) - side // 2  # (n, 2)
    x = torch.arange(width, device=device).repeat_interleave(3) - corner[:, :1]  # (n, 3W)
    y = torch.arange(height, device=device) - corner[:, 1:]  # (n, H)
    # Masks of 0 and 255: on a CPU, bitwise operations on bytes are ten times as fast as torch.where.
    rows, columns = (((z >= 0) & (z < side)).to(torch.uint8) * 255 for z in (y, x))
    values = images.view(-1, height, 3 * width)
    change = values ^ _row_of(fill, width, device)
    values ^= change.bitwise_and_(rows[:, :, None]).bitwise_and_(columns[:, None, :])


# Tables: (n, H, W, 3) and (n,) -> (n, 3, 256), or a shape that broadcasts to it.


def _levels(pixels: Tensor) -> Tensor:
    return torch.arange(256, device=pixels.device)


def _autocontrast(pixels: Tensor, _: Tensor) -> Tensor:
    low = 255 - _brightest(255 - pixels).to(torch.float64)  # (n, 3, 1)
    span = _brightest(pixels).to(torch.float64) - low
    level = _levels(pixels).to(torch.float64)
    # Divide tensor by tensor: torch turns `255.0 / span` into a product with the reciprocal, which rounds twice.
    scale = torch.full_like(span, 255.0) / span.clamp(min=1.0)
    stretched = (level * scale + -low * scale).clamp(0.0, 255.0)
    return torch.where(span > 0, stretched, level).to(torch.uint8)


def _equalize(pixels: Tensor, _: Tensor) -> Tensor:
    n, height, width, _channels = pixels.shape
    index = _level_index(pixels, torch.int64).flatten()
    one = torch.ones(1, dtype=torch.int64, device=pixels.device)
    count = torch.zeros(n * 3 * 256, dtype=torch.int64, device=pixels.device)
    count = count.scatter_add_(0, index, one.expand_as(index)).view(n, 3, 256)
    # Every `step` pixels advance the result by one of 255 levels; the brightest level that occurs is not counted.
    step = (height * width - count.gather(2, _brightest(pixels).to(torch.int64))) // 255  # (n, 3, 1)
    below = count.cumsum(2) - count
    table = ((step // 2 + below) // step.clamp(min=1)).clamp(max=255)
    return torch.where(step > 0, table, _levels(pixels)).to(torch.uint8)


def _invert(pixels: Tensor, _: Tensor) -> Tensor:
    return (255 - _levels(pixels)).to(torch.uint8)


def _posterize(pixels: Tensor, amount: Tensor) -> Tensor:
    dropped = 8 - _POSTERIZE_BITS + (amount.abs() * _POSTERIZE_BITS).to(torch.int64)[:, None, None]
    return ((_levels(pixels) >> dropped) << dropped).to(torch.uint8)


def _solarize(pixels: Tensor, amount: Tensor) -> Tensor:
    level = _levels(pixels)
    threshold = 256 - (amount.abs() * 256).to(torch.int64)[:, None, None]
    return torch.where(level < threshold, level, 255 - level).to(torch.uint8)


def _contrast(pixels: Tensor, amount: Tensor) -> Tensor:
    area = pixels.shape[1] * pixels.shape[2]
    mean = (2 * _luma(pixels).sum((1, 2), dtype=torch.int64) + area) // (2 * area)  # (n,), rounded
    return _blend(mean.to(torch.float32)[:, None, None], _levels(pixels), _factor(amount)[:, None, None])


def _brightness(pixels: Tensor, amount: Tensor) -> Tensor:
    black = torch.zeros((), device=pixels.device)
    return _blend(black, _levels(pixels), _factor(amount)[:, None, None])


# Faded images: (n, H, W, 3) -> the same shape, float32.


def _gray(pixels: Tensor) -> Tensor:
    return _luma(pixels).to(torch.float32)[..., None].expand(pixels.shape)


def _smooth(pixels: Tensor) -> Tensor:
    """A 3 x 3 filter with weight 5 in the centre and 1 around it, divided by 13; border pixels are unchanged."""
    # Channels are interleaved, so a pixel's neighbours in its row are 3 values away.
    rows = pixels.flatten(2).to(torch.int16)  # (n, H, 3W)
    sums = rows[:, :-2] + rows[:, 1:-1] + rows[:, 2:]
    sums = sums[:, :, :-6] + sums[:, :, 3:-3] + sums[:, :, 6:]
    sums += rows[:, 1:-1, 3:-3] * 4
    faded = rows.to(torch.float32)
    # Multiples of 1/13 are never close to a half, so float32 rounding does not matter.
    faded[:, 1:-1, 3:-3] = sums.to(torch.float32).div_(13.0).add_(0.5).floor_()
    return faded.view_as(pixels)


# Matrices: amount, height, width -> (a, b, c, d, e, f). The source of pixel (x, y) is (ax + by + c, dx + ey + f).


def _rotate(amount: float, height: int, width: int) -> Matrix:
    angle = -math.radians(amount * _DEGREES)
    cos, sin = math.cos(angle), math.sin(angle)
    x, y = width / 2, height / 2
    return cos, sin, x - cos * x - sin * y, -sin, cos, y + sin * x - cos * y


def _shear_x(amount: float, _height: int, _width: int) -> Matrix:
    return 1.0, amount * _SHEAR, 0.0, 0.0, 1.0, 0.0


def _shear_y(amount: float, _height: int, _width: int) -> Matrix:
    return 1.0, 0.0, 0.0, amount * _SHEAR, 1.0, 0.0


def _translate_x(amount: float, _height: int, width: int) -> Matrix:
    return 1.0, 0.0, float(int(amount * _TRANSLATE * width)), 0.0, 1.0, 0.0


def _translate_y(amount: float, height: int, _width: int) -> Matrix:
    return 1.0, 0.0, 0.0, 0.0, 1.0, float(int(amount * _TRANSLATE * height))


POINT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "autocontrast": _autocontrast,
    "equalize": _equalize,
    "invert": _invert,
    "posterize": _posterize,
    "solarize": _solarize,
    "contrast": _contrast,
    "brightness": _brightness,
}
BLEND: dict[str, Callable[[Tensor], Tensor]] = {"color": _gray, "sharpness": _smooth}
AFFINE: dict[str, Callable[[float, int, int], Matrix]] = {
    "rotate": _rotate,
    "shear_x": _shear_x,
    "shear_y": _shear_y,
    "translate_x": _translate_x,
    "translate_y": _translate_y,
}


# Shared by the families.


def _groups(pixels: Tensor, parts: Parts) -> Iterator[tuple[Tensor, tuple[str, list[float]]]]:
    return zip(pixels.split([len(amounts) for _, amounts in parts]), parts, strict=True)


def _to_device(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)


def _factor(amount: Tensor) -> Tensor:
    return (amount * _ENHANCE + 1.0).to(torch.float32)


def _blend(faded: Tensor, image: Tensor, factor: Tensor) -> Tensor:
    """faded + factor * (image - faded), clamped and truncated, with Pillow's two float32 roundings."""
    mixed = (image.to(torch.float32) - faded) * factor
    return mixed.add_(faded).clamp_(0.0, 255.0).to(torch.int16).to(torch.uint8)  # faster than directly to uint8


def _luma(pixels: Tensor) -> Tensor:
    """ITU-R 601 in 16-bit fixed point: (n, H, W) int32."""
    red, green, blue = (channel.to(torch.int32) for channel in pixels.unbind(-1))
    return (red * 19595 + green * 38470 + blue * 7471 + (1 << 15)) >> 16


def _brightest(pixels: Tensor) -> Tensor:
    """The highest level of each channel, (n, 3, 1)."""
    rows = pixels.flatten(2).amax(1)  # (n, 3W): reduce over rows first, which is faster
    return rows.unflatten(1, (-1, 3)).amax(1)[..., None]


def _row_of(fill: tuple[int, int, int], width: int, device: torch.device) -> Tensor:
    """A row of pixels, (3 * width,) uint8."""
    return _to_device(fill, torch.uint8, device).repeat(width)


def _level_index(pixels: Tensor, dtype: torch.dtype) -> Tensor:
    """The index of every value (n, H, 3W) in a flattened table (n, 3, 256) by sample, channel and level."""
    n, _, width, _ = pixels.shape
    channel = torch.arange(3, dtype=dtype, device=pixels.device).repeat(width)  # (3W,): a long last axis is fast
    sample = torch.arange(n, dtype=dtype, device=pixels.device)[:, None, None] * 3
    return pixels.flatten(2) + (sample + channel) * 256


def _fixed_point(matrix: Matrix) -> list[int]:
    """The matrix in 16.16 fixed point, shifted so that integer (x, y) refer to the centres of pixels."""
    a, b, c, d, e, f = matrix
    centered = (a, b, c + a * 0.5 + b * 0.5, d, e, f + d * 0.5 + e * 0.5)
    return [math.floor(value * _ONE + 0.5) for value in centered]
