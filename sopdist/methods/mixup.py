"""MixUp over the global batch: pairs and weights are the same on any number of ranks.

Two ranks, a global batch of samples a b | c d with the order 2 0 3 1: rank 0 mixes a with c and b with a, rank 1 c with
d and d with b. Images and targets of the other ranks are gathered.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

_STREAM = 3  # of the counter, so that no two purposes share random numbers


class Pairs(NamedTuple):
    """What this rank mixes."""

    partner: Tensor  # (B,) int64: position in the global batch
    share: Tensor  # (B,) float32: of the sample itself, in [0.5, 1]; the rest is the partner's


def draw_pairs(seed: int, step: int, sizes: list[int], rank: int, alpha: float, device: torch.device) -> Pairs:
    """Partners and shares of step `step`: a function of (seed, step), for ranks with batches of these sizes."""
    draws = np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, step, _STREAM]))
    total, first = sum(sizes), sum(sizes[:rank])
    share = draws.beta(alpha, alpha, total)
    partner = draws.permutation(total)
    mine = slice(first, first + sizes[rank])
    shares = torch.from_numpy(np.maximum(share, 1 - share)[mine].astype(np.float32))
    return Pairs(torch.from_numpy(partner[mine]).to(device), shares.to(device))


def gather(values: Tensor, sizes: list[int], group: dist.ProcessGroup | None) -> Tensor:
    """The values of all ranks, (sum of sizes, ...), each rank giving as many as `sizes` says. Collective."""
    if group is None:
        return values
    padded = values.new_zeros(max(sizes), *values.shape[1:])
    padded[: len(values)] = values
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def mix(images: Tensor, pairs: Pairs, everything: Tensor) -> Tensor:
    """Mixed images (B, C, H, W); `everything` has those of all ranks."""
    share = pairs.share.view(-1, *[1] * (images.dim() - 1))
    return share * images + (1 - share) * everything[pairs.partner]


def mixed_losses(logits: Tensor, targets: Tensor, pairs: Pairs, all_targets: Tensor) -> Tensor:
    """Cross-entropy of mixed images (B, K) with the targets of both samples (B,), weighted by their shares."""
    own = F.cross_entropy(logits, targets, reduction="none")
    other = F.cross_entropy(logits, all_targets[pairs.partner], reduction="none")
    return pairs.share * own + (1 - pairs.share) * other
