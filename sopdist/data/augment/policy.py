"""The strong view of a sample: two random operations, then Cutout. As in UDA (Xie et al. 2020) and RandAugment.

Which operations, and how strong, is a pure function of the random numbers that are handed in, so that the same sample
looks the same in every backend, on every device and in every batch. This file chooses; `policy_ops.py` has the
operations and says what they mean. Neither knows where random numbers or images come from.

A sample's draws are POLICY_DRAWS = 18 uniforms in [0, 1), whatever the policy; a column never changes its meaning:

    0, 1                cutout: x and y of its centre
    2 + 4 i .. 5 + 4 i  layer i < 4: which operation, whether to apply it, its magnitude, its sign

Differences from UDA's public code: magnitudes are continuous in [0, 1) instead of tenths from 0.1 to 0.9, and Cutout is
not also one of the operations, since it ends every policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .policy_ops import AFFINE, BLEND, MOST_SIDE, POINT, Parts, blend, cut_out, point, warp

MOST_LAYERS = 4
POLICY_DRAWS = 2 + 4 * MOST_LAYERS

# A draw chooses by place: the order is part of what a seed means.
OPERATIONS = (*POINT, *BLEND, *AFFINE)

_CHUNK = 1 << 21  # values at a time on a CPU, so that indices and floats reuse memory: 1.3x faster at 224 x 224


@dataclass(frozen=True)
class Policy:
    """How strong the strong view is. The defaults are UDA's for CIFAR."""

    layers: int = 2  # operations one after another, at most MOST_LAYERS
    probability: float = 0.5  # that a chosen operation is applied
    magnitude: float = 1.0  # the largest strength drawn: 1 is the end of each operation's range, see policy_ops.py
    cutout: float = 0.5  # side of the square, as a fraction of the shorter side of the image; 0: none
    fill: tuple[int, int, int] = (128, 128, 128)  # for the square and for what comes from outside; UDA: the data's mean

    def __post_init__(self) -> None:
        if not 0 <= self.layers <= MOST_LAYERS:
            raise ValueError(f"policy.layers = {self.layers}: allowed is 0 to {MOST_LAYERS}")
        for name in ("probability", "magnitude", "cutout"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"policy.{name} = {getattr(self, name)}: allowed is 0 to 1")
        if len(self.fill) != 3 or not all(isinstance(level, int) and 0 <= level <= 255 for level in self.fill):
            raise ValueError(f"policy.fill = {self.fill}: must be three integers from 0 to 255, red, green and blue")


def apply_policy(images: Tensor, draws: Tensor, policy: Policy) -> Tensor:
    """The strong view of each image: uint8 (B, H, W, 3) -> a new tensor of the same kind.

    `draws` is float64 (B, POLICY_DRAWS), best on the CPU: choices are made there, and draws on a GPU are waited for.
    """
    draws = draws.cpu()
    _check(images, draws)
    batch, height, width, _ = images.shape
    # Correctly rounded, uniform * k < k for any whole k, so that no floor below reaches its upper end.
    centers = (draws[:, :2] * torch.tensor([width, height], dtype=torch.float64)).to(torch.int64).tolist()
    layers = draws[:, 2 : 2 + 4 * policy.layers].reshape(batch, policy.layers, 4).permute(1, 2, 0)  # (layers, 4, B)
    side = int(policy.cutout * min(height, width) + 0.5)

    out = torch.empty(images.shape, dtype=torch.uint8, device=images.device)
    samples = max(1, _CHUNK // (height * width * 3)) if images.device.type == "cpu" else max(1, batch)
    for start in range(0, batch, samples):
        rows = slice(start, start + samples)
        views = list(images[rows])  # a list, so that samples without an operation are not copied at every layer
        for layer in layers[:, :, rows]:
            _apply_layer(views, layer, policy)
        torch.stack(views, out=out[rows])
        if side:
            cut_out(out[rows], centers[rows], side, policy.fill)
    return out


def _apply_layer(views: list[Tensor], draws: Tensor, policy: Policy) -> None:
    """Replace each view whose draws (a column of (4, B)) say so by what its operation makes of it."""
    which, whether, magnitude, sign = draws
    magnitude = magnitude * policy.magnitude
    amounts = torch.where(sign < 0.5, -magnitude, magnitude).tolist()
    members: dict[str, list[int]] = {name: [] for name in OPERATIONS}
    for sample, (place, applied) in enumerate(zip((which * len(OPERATIONS)).tolist(), whether.tolist(), strict=True)):
        if applied < policy.probability:
            members[OPERATIONS[int(place)]].append(sample)

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
    if not 1 <= min(images.shape[1:3]) <= max(images.shape[1:3]) <= MOST_SIDE:
        raise ValueError(f"images must have sides from 1 to {MOST_SIDE}, not {_kind(images)}")
    if draws.dtype != torch.float64 or draws.shape != (len(images), POLICY_DRAWS):
        raise ValueError(f"draws must be float64 ({len(images)}, {POLICY_DRAWS}), not {_kind(draws)}")
    if not ((draws >= 0.0) & (draws < 1.0)).all():
        raise ValueError("draws must be in [0, 1)")


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
