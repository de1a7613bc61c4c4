"""The strong view of a sample: two random operations, then Cutout, as in UDA (Xie et al. 2020) and RandAugment.

The choice of operations and their magnitudes is a pure function of the random numbers passed in. A sample therefore
looks the same with every backend, on every device and in every batch. This file chooses the operations;
`policy_ops.py` implements and documents them. Neither knows where random numbers or images come from.

A sample's draws are POLICY_DRAWS = 18 uniforms in [0, 1), for every policy. The meaning of a column never changes:

    0, 1                Cutout: x and y of its centre
    2 + 4 i .. 5 + 4 i  layer i < 4: which operation, whether to apply it, its magnitude, its sign

Differences from UDA's public code: magnitudes are continuous in [0, 1) instead of multiples of 0.1 from 0.1 to 0.9, and
Cutout is not one of the random operations, since every policy ends with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .policy_ops import AFFINE, BLEND, MAX_SIDE, POINT, Parts, blend, cut_out, point, warp

MAX_LAYERS = 4
POLICY_DRAWS = 2 + 4 * MAX_LAYERS

# A draw selects an operation by its position, so this order must never change: it is part of the meaning of a seed.
OPERATIONS = (*POINT, *BLEND, *AFFINE)

_CHUNK = 1 << 21  # values per chunk on a CPU, so that temporaries reuse memory: 1.3x faster at 224 x 224


@dataclass(frozen=True)
class Policy:
    """Strength of the strong view. The defaults are UDA's for CIFAR."""

    layers: int = 2  # number of operations applied in sequence, at most MAX_LAYERS
    probability: float = 0.5  # that a chosen operation is applied
    magnitude: float = 1.0  # largest magnitude drawn: 1 is the end of each operation's range, see policy_ops.py
    cutout: float = 0.5  # side of the square, as a fraction of the shorter side of the image; 0: no Cutout
    fill: tuple[int, int, int] = (128, 128, 128)  # colour of the square and of pixels from outside; UDA: data mean

    def __post_init__(self) -> None:
        if not 0 <= self.layers <= MAX_LAYERS:
            raise ValueError(f"policy.layers = {self.layers}: must be from 0 to {MAX_LAYERS}")
        for name in ("probability", "magnitude", "cutout"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"policy.{name} = {getattr(self, name)}: must be from 0 to 1")
        if len(self.fill) != 3 or not all(isinstance(level, int) and 0 <= level <= 255 for level in self.fill):
            raise ValueError(f"policy.fill = {self.fill}: must be three integers from 0 to 255, red, green and blue")


def apply_policy(images: Tensor, draws: Tensor, policy: Policy) -> Tensor:
    """The strong view of each image: uint8 (B, H, W, 3) -> a new tensor of the same shape and type.

    `draws` is float64 (B, POLICY_DRAWS), preferably on the CPU: operations are chosen there, so draws on a GPU cause a
    synchronisation.
    """
    draws = draws.cpu()
    _check(images, draws)
    batch, height, width, _ = images.shape
    # With correct rounding, uniform * k < k for any integer k, so no floor below reaches its upper bound.
    centers = (draws[:, :2] * torch.tensor([width, height], dtype=torch.float64)).to(torch.int64).tolist()
    layers = draws[:, 2 : 2 + 4 * policy.layers].reshape(batch, policy.layers, 4).permute(1, 2, 0)  # (layers, 4, B)
    side = int(policy.cutout * min(height, width) + 0.5)

    out = torch.empty(images.shape, dtype=torch.uint8, device=images.device)
    samples = max(1, _CHUNK // (height * width * 3)) if images.device.type == "cpu" else max(1, batch)
    for start in range(0, batch, samples):
        chunk = slice(start, start + samples)
        views = list(images[chunk])  # a list, so that samples without an operation are not copied at every layer
        for layer in layers[:, :, chunk]:
            _apply_layer(views, layer, policy)
        torch.stack(views, out=out[chunk])
        if side:
            cut_out(out[chunk], centers[chunk], side, policy.fill)
    return out


def _apply_layer(views: list[Tensor], draws: Tensor, policy: Policy) -> None:
    """Apply one operation to each view in place, as chosen by its draws (a column of (4, B))."""
    which, whether, magnitude, sign = draws
    magnitude = magnitude * policy.magnitude
    amounts = torch.where(sign < 0.5, -magnitude, magnitude).tolist()
    members: dict[str, list[int]] = {name: [] for name in OPERATIONS}
    for sample, (choice, applied) in enumerate(zip((which * len(OPERATIONS)).tolist(), whether.tolist(), strict=True)):
        if applied < policy.probability:
            members[OPERATIONS[int(choice)]].append(sample)

    families: tuple[tuple[Callable[[Tensor, Parts], Tensor], Iterable[str]], ...] = (
        (point, POINT),
        (blend, BLEND),
        (partial(warp, fill=policy.fill), AFFINE),
    )
    for run, names in families:
        parts = [(name, [amounts[sample] for sample in members[name]]) for name in names if members[name]]
        if parts:
            samples = [sample for name, _ in parts for sample in members[name]]
            done = run(torch.stack([views[sample] for sample in samples]), parts)
            for sample, view in zip(samples, done, strict=True):
                views[sample] = view


def _check(images: Tensor, draws: Tensor) -> None:
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[3] != 3:
        raise ValueError(f"images must be uint8 (B, H, W, 3), not {_kind(images)}")
    if not 1 <= min(images.shape[1:3]) <= max(images.shape[1:3]) <= MAX_SIDE:
        raise ValueError(f"images must have sides from 1 to {MAX_SIDE}, not {_kind(images)}")
    if draws.dtype != torch.float64 or draws.shape != (len(images), POLICY_DRAWS):
        raise ValueError(f"draws must be float64 ({len(images)}, {POLICY_DRAWS}), not {_kind(draws)}")
    if not ((draws >= 0.0) & (draws < 1.0)).all():
        raise ValueError("draws must be in [0, 1)")


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
