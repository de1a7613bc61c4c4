"""Crop, resize, mirror and normalise one image on the CPU.

`pixels.c` does the work. Without a C compiler, Pillow and NumPy are used instead, with bit-identical results.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

Pixels = NDArray[np.uint8]  # (height, width, 3)

_P, _INT = ctypes.c_void_p, ctypes.c_int


@functools.cache
def _library() -> ctypes.CDLL | None:
    spec = importlib.util.find_spec("sopdist.data.decode._pixels")
    if spec is None or spec.origin is None:
        return None
    library = ctypes.CDLL(spec.origin)
    library.sopdist_crop.argtypes = [_P, *(_INT,) * 8, _P]
    library.sopdist_crop.restype = _INT
    library.sopdist_normalize.argtypes = [_P, _P, ctypes.c_int64, _P, _P]
    library.sopdist_normalize.restype = None
    library.sopdist_unfilter.argtypes = [_P, _INT, _INT, _INT, _P]
    library.sopdist_unfilter.restype = _INT
    return library


def is_built() -> bool:
    """Whether `pixels.c` was compiled when the package was installed."""
    return _library() is not None


def crop(image: Pixels, box: NDArray[np.int32], mirror: bool, to: Pixels) -> None:
    """Crop the box (x, y, width, height) and resize it to `to`, (side, side, 3). Pixels outside the image are black."""
    library = _library()
    if library is None:
        crop_with_pillow(image, box, mirror, to)
        return
    image = np.ascontiguousarray(image)
    height, width, _ = image.shape
    x, y, box_width, box_height = box.tolist()
    if box_width < 1 or box_height < 1 or to.dtype != np.uint8 or not to.flags.c_contiguous:
        raise ValueError(f"box {box.tolist()} into {to.dtype} {to.shape}")
    if not library.sopdist_crop(
        image.ctypes.data, height, width, x, y, box_width, box_height, mirror, len(to), to.ctypes.data
    ):
        raise MemoryError("out of memory while resizing an image")


def crop_with_pillow(image: Pixels, box: NDArray[np.int32], mirror: bool, to: Pixels) -> None:
    """`crop` implemented with Pillow."""
    x, y, width, height = box.tolist()
    cut = Image.fromarray(image).crop((x, y, x + width, y + height))
    # One axis at a time: the order of the two affects the bits, and Pillow's own order depends on its version.
    for axis in (0, 1) if height > len(to) else (1, 0):
        cut = _resize_axis(cut, axis, len(to))
    pixels = np.asarray(cut)
    to[:] = pixels[:, ::-1] if mirror else pixels


def _resize_axis(image: Image.Image, axis: int, side: int) -> Image.Image:
    """Resize along axis 0 or 1, with the edge pixels repeated beyond the edges of the image."""
    length = image.size[1 - axis]
    if length == side:
        return image
    margin = int(max(1.0, length / side)) + 2
    widths = [(margin, margin) if a == axis else (0, 0) for a in range(3)]
    padded = Image.fromarray(np.pad(np.asarray(image), widths, mode="edge"))
    if axis == 0:
        return padded.resize((image.width, side), Image.Resampling.BILINEAR, (0, margin, image.width, margin + length))
    return padded.resize((side, image.height), Image.Resampling.BILINEAR, (margin, 0, margin + length, image.height))


def unfilter(raw: NDArray[np.uint8], height: int, width: int, channels: int) -> Pixels | None:
    """Undo the row filters of a PNG in place. Returns RGB; None if a filter is unknown, or without the C code."""
    library = _library()
    if library is None:
        return None
    if len(raw) != height * (1 + width * channels) or channels not in (1, 3) or not raw.flags.writeable:
        raise ValueError(f"{len(raw)} bytes for {height} rows of {width} pixels in {channels} channels")
    pixels = np.empty((height, width, 3), np.uint8)
    known = library.sopdist_unfilter(raw.ctypes.data, height, width, channels, pixels.ctypes.data)
    return pixels if known else None


class Normalizer:
    """(pixel - 255 mean) / (255 std) in float32, with the same operations in the same order in C, NumPy and torch."""

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        self.mean = np.array(mean, dtype=np.float64).astype(np.float32) * np.float32(255)
        self.scale = (1 / (np.array(std, dtype=np.float64) * 255)).astype(np.float32)

    def __call__(self, pixels: Pixels, to: NDArray[np.float32]) -> None:
        """Normalise pixels, (..., 3), into `to`, which has the same shape."""
        library = _library()
        if library is None:
            np.subtract(pixels, self.mean, out=to)
            to *= self.scale
            return
        if not (pixels.flags.c_contiguous and to.flags.c_contiguous and pixels.shape == to.shape):
            raise ValueError(f"{pixels.shape} into {to.shape}: must be contiguous arrays of the same shape")
        library.sopdist_normalize(
            pixels.ctypes.data, to.ctypes.data, pixels.size // 3, self.mean.ctypes.data, self.scale.ctypes.data
        )

    def tensor(self, pixels: Tensor) -> Tensor:
        """Normalise a tensor on any device."""
        mean, scale = (torch.from_numpy(values).to(pixels.device) for values in (self.mean, self.scale))
        return (pixels - mean) * scale
