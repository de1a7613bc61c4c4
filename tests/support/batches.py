"""Random batches for the tests of `SOP`, and tables compared."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from sopdist import SOP

VARIANTS = ("flow", "paper", "official")
LAYOUTS = ("dense", "slots")


def batch(count: int, classes: int, samples: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(count, classes, generator=generator) * 3
    index = torch.randperm(samples, generator=generator)[:count]
    return z, torch.randint(classes, (count,), generator=generator), index


def snapshot(sop: SOP) -> dict[str, Tensor]:
    return copy.deepcopy(dict(sop.state_dict()))


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
