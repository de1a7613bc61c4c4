"""The two extra terms of SOP+: agreement between two views of an image, and balance between the classes.

consistency = mean over the batch of KL( p(view 1) || p(view 2) ),   view 1 is the target and gets no gradient
balance     = KL( prior || mean over the batch of p(view 1) )
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def consistency_term(logits: Tensor, logits2: Tensor, weight: Tensor) -> Tensor:
    """Weighted sum over samples; `weight` (B,)."""
    target = F.log_softmax(logits.detach(), dim=1)
    return (F.kl_div(F.log_softmax(logits2, dim=1), target, reduction="none", log_target=True).sum(1) * weight).sum()


def weighted_prediction(logits: Tensor, weight: Tensor) -> Tensor:
    """Weighted sum of the predictions over samples, (K,); `weight` (B,)."""
    return (F.softmax(logits, dim=1) * weight[:, None]).sum(0)


def balance_term(prediction: Tensor, weight: Tensor, prior: Tensor) -> Tensor:
    """KL(prior || mean prediction), from the weighted sum of predictions (K,) and the total weight; 0 if that is 0."""
    mean = prediction / weight.where(weight > 0, 1)
    tiny = torch.finfo(mean.dtype).tiny
    kl = (torch.xlogy(prior, prior) - prior * mean.clamp_min(tiny).log()).sum()
    return kl * (weight > 0)


def as_share_of_all(sums: Tensor, of_all: Tensor, weight: Tensor) -> Tensor:
    """Return the sums over the samples of all ranks, with the gradient of this rank's samples only.

    The term computed from them is multiplied by this rank's share of the total weight. The gradient is therefore scaled
    by the inverse: summed over ranks, it equals the gradient of the term over the global batch.
    """
    mine = sums * (of_all[-1] / weight.where(weight > 0, 1)).detach()
    return mine + (of_all - mine).detach()
