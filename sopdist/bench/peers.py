"""The noise table as autograd and an optimiser would keep it: the peers that `bench table` measures against.

Both compute what `SOP(variant="official")` computes, in float32, from the loss alone:

    u2 = clamp(u^2 y),  v2 = clamp(v^2 (1 - y)),  to [0, 1];  w = max(p + u2 - v2, eps),  phi = clamp(w / sum w) to [eps, 1]
    loss = -log phi_y, with v2 held constant, + || onehot(argmax p) + u2 - v2 - y ||^2        mean over the batch

and step with plain SGD. They differ in what the gradient of the table is: all of N x K, or the rows of the batch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def published_loss(logits: Tensor, labels: Tensor, u: Tensor, v: Tensor, eps: float) -> Tensor:
    """The authors' loss of a batch, with u (B, 1) and v (B, K) of its samples."""
    classes = logits.shape[1]
    y = F.one_hot(labels, classes).to(logits.dtype)  # (B, K)
    u2 = (u.square() * y).clamp(0, 1)
    v2 = (v.square() * (1 - y)).clamp(0, 1)
    w = (logits.softmax(dim=1) + u2 - v2.detach()).clamp_min(eps)
    phi = (w / w.sum(dim=1, keepdim=True)).clamp(eps, 1)
    cross_entropy = -(y * phi.log()).sum(dim=1).mean()
    prediction = F.one_hot(logits.argmax(dim=1), classes).to(logits.dtype)
    return cross_entropy + (prediction + u2 - v2 - y).square().sum(dim=1).mean()


class DenseParameters(nn.Module):
    """The authors' formulation: u (N, 1) and v (N, K) are parameters, indexed by sample; their gradients are as large."""

    def __init__(self, u: Tensor, v: Tensor) -> None:
        super().__init__()
        self.u, self.v = nn.Parameter(u[:, None].clone()), nn.Parameter(v.clone())

    def forward(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of u and v."""
        return self.u[index], self.v[index]


class SparseEmbedding(nn.Module):
    """u and v as embeddings with sparse gradients, as a PyTorch user would keep a large table."""

    def __init__(self, u: Tensor, v: Tensor) -> None:
        super().__init__()
        self.u = nn.Embedding.from_pretrained(u[:, None].clone(), freeze=False, sparse=True)
        self.v = nn.Embedding.from_pretrained(v.clone(), freeze=False, sparse=True)

    def forward(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of u and v."""
        return self.u(index), self.v(index)


class AutogradStep:
    """One step of a peer: the loss of a batch, its gradient by autograd, plain SGD on the table."""

    def __init__(self, table: DenseParameters | SparseEmbedding, *, lr_u: float, lr_v: float, eps: float) -> None:
        self.table, self.eps = table, eps
        u, v = table.parameters()
        self.optimizer = torch.optim.SGD([{"params": [u], "lr": lr_u}, {"params": [v], "lr": lr_v}])

    def __call__(self, logits: Tensor, labels: Tensor, index: Tensor) -> Tensor:
        """The loss; the rows of the batch are updated."""
        self.optimizer.zero_grad()
        loss = published_loss(logits, labels, *self.table(index), self.eps)
        loss.backward()
        self.optimizer.step()
        return loss.detach()
