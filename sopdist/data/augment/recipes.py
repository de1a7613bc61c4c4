"""Recipes: crop, flip and normalisation of images, for training and for evaluation.

A recipe only knows geometry. It turns image sizes and random numbers into boxes, in integer pixels of the source image,
which either decoder crops and resizes to `size` x `size`. "Resize to 256, then crop 224" becomes a box whose side is
224/256 of the short side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError

Crop = Literal[
    "shift",  # the full image, shifted by up to `padding` pixels
    "window",  # a square at a random position
    "area",  # a rectangle of random area, aspect ratio and position
]
Boxes = NDArray[np.int32]  # (B, 4): x, y, width, height
Sides = NDArray[np.int64]  # (B,): widths or heights

_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Recipe:
    """Crop, flip and normalisation of a data set."""

    size: int  # side of the square image that the network gets
    crop: Crop
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    flip: bool = True  # mirror half of the training images
    padding: int = 0  # shift: largest shift in pixels; pixels outside the image are black
    resize: int = 0  # window, and area in evaluation: short side of the image before a square of `size` is cropped
    area: tuple[float, float] = (0.08, 1.0)  # area: range of the fraction of the image
    aspect: tuple[float, float] = (3 / 4, 4 / 3)  # area: range of width / height
    grey: bool = False  # one channel instead of three, for greyscale images

    def __post_init__(self) -> None:
        if self.crop not in get_args(Crop):
            raise DataError(f"recipe: crop = {self.crop!r}: must be one of {', '.join(get_args(Crop))}")
        if self.size < 1 or self.padding < 0 or min(self.std) <= 0:
            raise DataError(f"recipe: size = {self.size}, padding = {self.padding}, std = {self.std}: too small")
        if self.crop != "shift" and self.resize < self.size:
            raise DataError(f"recipe: resize = {self.resize}: must be at least size = {self.size}")
        if not 0 < self.area[0] <= self.area[1] <= 1 or not 0 < self.aspect[0] <= self.aspect[1]:
            raise DataError(f"recipe: area = {self.area}, aspect = {self.aspect}: must be ranges, area within (0, 1]")

    def training_boxes(
        self, width: Sides, height: Sides, uniforms: NDArray[np.float64]
    ) -> tuple[Boxes, NDArray[np.bool_]]:
        """The boxes, and whether to mirror each image.

        `uniforms` is (B, 23 or more): position in x, position in y, mirror, ten areas and ten aspect ratios.
        """
        at_x, at_y, mirror = uniforms.T[:3]
        if self.crop == "shift":
            x, y = (np.floor(at * (2 * self.padding + 1)) - self.padding for at in (at_x, at_y))
            box_width, box_height = width, height
        else:
            box_width, box_height = self._window(width, height)
            if self.crop == "area":
                box_width, box_height = self._random_area(width, height, uniforms[:, 3:13], uniforms[:, 13:23])
            x, y = np.floor(at_x * (width - box_width + 1)), np.floor(at_y * (height - box_height + 1))
        boxes = np.stack([x, y, box_width, box_height], axis=1).astype(np.int32)  # (B, 4)
        return boxes, (mirror < 0.5) & self.flip

    def evaluation_boxes(self, width: Sides, height: Sides) -> Boxes:
        """The centre crop of each image."""
        box_width, box_height = (width, height) if self.crop == "shift" else self._window(width, height)
        boxes = [(width - box_width) // 2, (height - box_height) // 2, box_width, box_height]
        return np.stack(boxes, axis=1).astype(np.int32)

    def _window(self, width: Sides, height: Sides) -> tuple[Sides, Sides]:
        """A square with a side of size/resize of the short side."""
        short = np.minimum(width, height)
        side = np.clip(np.rint(short * (self.size / self.resize)).astype(np.int64), 1, short)
        return side, side

    def _random_area(
        self, width: Sides, height: Sides, area: NDArray[np.float64], aspect: NDArray[np.float64]
    ) -> tuple[Sides, Sides]:
        """Area uniform, aspect ratio log-uniform: the first of ten draws that fits, as in torchvision and DALI.

        If no draw fits, which happens only for very wide or tall images, the largest box of an allowed aspect ratio.
        """
        width, height = width[:, None], height[:, None]
        low, high = self.area
        target = width * height * (low + area * (high - low))  # (B, 10)
        narrow, wide = self.aspect
        ratio = np.exp2(np.log2(narrow) + aspect * (np.log2(wide) - np.log2(narrow)))
        last_width, last_height = np.minimum(width, np.rint(height * wide)), np.minimum(height, np.rint(width / narrow))
        widths = np.concatenate([np.rint(np.sqrt(target * ratio)), last_width], axis=1).clip(1).astype(np.int64)
        heights = np.concatenate([np.rint(np.sqrt(target / ratio)), last_height], axis=1).clip(1).astype(np.int64)
        chosen = ((widths <= width) & (heights <= height)).argmax(axis=1, keepdims=True)  # the first
        take = np.take_along_axis
        return take(widths, chosen, axis=1)[:, 0], take(heights, chosen, axis=1)[:, 0]


def find_recipe(recipe: str | Recipe) -> Recipe:
    """Look up a recipe by name. A `Recipe` object is returned unchanged."""
    if isinstance(recipe, Recipe):
        return recipe
    if recipe not in RECIPES:
        raise DataError(f"data.recipe = {recipe!r}: no such recipe; available: {', '.join(RECIPES)}")
    return RECIPES[recipe]


RECIPES = {
    "cifar10": Recipe(32, "shift", (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010), padding=4),
    "cifar100": Recipe(32, "shift", (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761), padding=4),
    "clothing1m": Recipe(224, "window", (0.6959, 0.6537, 0.6371), (0.3113, 0.3192, 0.3214), resize=256),
    "webvision": Recipe(227, "window", _IMAGENET_MEAN, _IMAGENET_STD, resize=256),
    "imagenet": Recipe(224, "area", _IMAGENET_MEAN, _IMAGENET_STD, resize=256),
    "fashion-mnist": Recipe(28, "shift", (0.2860,) * 3, (0.3530,) * 3, flip=False, grey=True),
    "digits": Recipe(8, "shift", (0.3053,) * 3, (0.3759,) * 3, flip=False, grey=True),
    "cifar-plain": Recipe(32, "shift", (0.0,) * 3, (1.0,) * 3, flip=False),
}
