"""The two extra terms of SOP+: agreement between two views of an image, and balance between the classes.

consistency = mean over the batch of KL( p(view 1) || p(view 2) ),   view 1 is the target and gets no gradient
balance     = KL( prior || mean over the batch of p(view 1) )
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def consistency_term(logits: Tensor, logits2: Tensor, weight: Tensor) -> Tensor:
    """Weighted mean over the samples; `weight` (B,) sums to 1, or is all 0 for an empty batch."""
    target = F.log_softmax(logits.detach(), dim=1)
    return (F.kl_div(F.log_softmax(logits2, dim=1), target, reduction="none", log_target=True).sum(1) * weight).sum()


def balance_term(logits: Tensor, prior: Tensor, weight: Tensor) -> Tensor:
    """KL of the prior against the weighted mean prediction; `weight` (B,) sums to 1, or is all 0 for an empty batch."""
    mean = (F.softmax(logits, dim=1) * weight[:, None]).sum(0)  # (K,)
    tiny = torch.finfo(mean.dtype).tiny
    kl = (torch.xlogy(prior, prior) - prior * mean.clamp_min(tiny).log()).sum()
    return kl * (weight.sum() > 0)
