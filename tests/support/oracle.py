"""The formulas of the method in float64 and plain PyTorch, with gradients from autograd."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def one_hot(labels: Tensor, classes: int) -> Tensor:
    return F.one_hot(labels, classes).double()


def noise(u: Tensor, v: Tensor, labels: Tensor) -> Tensor:
    """s = u^2 y - v^2 (1 - y), squares clamped to [0, 1]; u (B,), v (B, K)."""
    y = one_hot(labels, v.shape[1])
    return (u.square().clamp(0, 1))[:, None] * y - v.square().clamp(0, 1) * (1 - y)


def phi(w: Tensor, eps: float, reclip: bool) -> Tensor:
    c = w.clamp(min=eps)
    c = c / c.sum(1, keepdim=True)
    return c.clamp(eps, 1) if reclip else c


def cross_entropy(z: Tensor, u: Tensor, v: Tensor, labels: Tensor, eps: float, reclip: bool) -> Tensor:
    """l_CE of each sample, (B,)."""
    w = z.softmax(1) + noise(u, v, labels)
    return -phi(w, eps, reclip).gather(1, labels[:, None])[:, 0].log()


def squared_error(z: Tensor, u: Tensor, v: Tensor, labels: Tensor) -> Tensor:
    """l_MSE of each sample, (B,)."""
    classes = z.shape[1]
    return (one_hot(z.argmax(1), classes) + noise(u, v, labels) - one_hot(labels, classes)).square().sum(1)


def gradients(z: Tensor, u: Tensor, v: Tensor, labels: Tensor, eps: float, variant: str) -> dict[str, Tensor]:
    """The losses, dl_CE/dz, and the gradients that the variant uses for u and v, from autograd."""
    z, u, v = (x.detach().double().requires_grad_() for x in (z, u, v))
    ce = cross_entropy(z, u, v, labels, eps, reclip=variant == "official")
    mse = squared_error(z, u, v, labels)
    (dz,) = torch.autograd.grad(ce.sum(), z, retain_graph=True)
    (du,) = torch.autograd.grad((ce + mse if variant == "official" else ce).sum(), u, retain_graph=True)
    (dv,) = torch.autograd.grad(mse.sum(), v)
    return {"losses": ce.detach(), "logits": dz, "u": du, "v": dv}
