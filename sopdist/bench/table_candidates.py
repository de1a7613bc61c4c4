"""Candidates of `sopdist bench table`: sopdist's layouts, and two tables trained by autograd.

Both baselines compute the same as `SOP(variant="official")`, with gradients from autograd and updates by plain SGD:

    u2 = clamp(u^2 y, 0, 1)        w = max(p + u2 - v2, eps)
    v2 = clamp(v^2 (1 - y), 0, 1)  phi = clamp(w / sum w, eps, 1)
    loss = -log phi_y, with v2 held constant, + || onehot(argmax p) + u2 - v2 - y ||^2, mean over the batch

They differ in the gradient of the table: dense (N x K), or only the rows of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from ..noise import SOP, NoiseTable, Official
from ..noise.rows import Layout, row_bytes

Batch = tuple[Tensor, Tensor, Tensor]  # logits (B, K), labels (B,), index (B,)
Step = Callable[[Tensor, Tensor, Tensor], Tensor]  # returns the loss of a batch and updates the table

LOGITS_POOL = 16  # distinct batches of logits: a few MB, more than the fastest cache holds


class Sizes(NamedTuple):
    """Samples, classes and batch size of one measurement."""

    samples: int
    classes: int
    batch: int

    def __str__(self) -> str:
        return f"N={self.samples:,} K={self.classes:,}"


def draw_batches(sizes: Sizes, count: int, *, seed: int = 0, requires_grad: bool = False) -> list[Batch]:
    """Batches of as many epochs as needed, each in a new random order, so that no batch repeats a sample.

    The logits are those of an untrained network: nearly every prediction contradicts the label, with another class at
    every visit, which then takes a slot. This is the worst case for the layout "slots".
    """
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(sizes.classes, (sizes.samples,), generator=random)
    shape = (min(count, LOGITS_POOL), sizes.batch, sizes.classes)
    pool = [logits.clone().requires_grad_(requires_grad) for logits in torch.randn(shape, generator=random)]
    steps = min(count, sizes.samples // sizes.batch)  # per epoch
    batches: list[Batch] = []
    while len(batches) < count:
        epoch = torch.randperm(sizes.samples, generator=random)[: steps * sizes.batch].view(steps, sizes.batch)
        batches += [(pool[(len(batches) + i) % len(pool)], labels[index], index) for i, index in enumerate(epoch)]
    return batches[:count]


def published_loss(logits: Tensor, labels: Tensor, u: Tensor, v: Tensor, eps: float) -> Tensor:
    """The authors' loss of a batch, given u (B, 1) and v (B, K) of its samples."""
    classes = logits.shape[1]
    y = one_hot(labels, classes).to(logits.dtype)  # (B, K)
    u2 = (u.square() * y).clamp(0, 1)
    v2 = (v.square() * (1 - y)).clamp(0, 1)
    w = (logits.softmax(dim=1) + u2 - v2.detach()).clamp_min(eps)
    phi = (w / w.sum(dim=1, keepdim=True)).clamp(eps, 1)
    fit = -(y * phi.log()).sum(dim=1).mean()
    prediction = one_hot(logits.argmax(dim=1), classes).to(logits.dtype)
    return fit + (prediction + u2 - v2 - y).square().sum(dim=1).mean()


class DenseParameters(nn.Module):
    """The authors' formulation: parameters u (N, 1) and v (N, K), indexed by sample, with dense gradients."""

    def __init__(self, u: Tensor, v: Tensor) -> None:
        super().__init__()
        self.u, self.v = nn.Parameter(u[:, None]), nn.Parameter(v)

    def forward(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of u and v."""
        return self.u[index], self.v[index]


class SparseEmbedding(nn.Module):
    """u and v as embeddings with sparse gradients, PyTorch's own tool for large tables."""

    def __init__(self, u: Tensor, v: Tensor) -> None:
        super().__init__()
        self.u = nn.Embedding.from_pretrained(u[:, None], freeze=False, sparse=True)
        self.v = nn.Embedding.from_pretrained(v, freeze=False, sparse=True)

    def forward(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of u and v."""
        return self.u(index), self.v(index)


class AutogradStep:
    """A step of a baseline: the published loss, its gradient by autograd, plain SGD on u and v."""

    def __init__(self, table: DenseParameters | SparseEmbedding, *, lr_u: float, lr_v: float, eps: float) -> None:
        self.table, self.eps = table, eps
        self.u, self.v = table.parameters()  # (N, 1), (N, K)
        self.optimizer = torch.optim.SGD([{"params": [self.u], "lr": lr_u}, {"params": [self.v], "lr": lr_v}])

    def __call__(self, logits: Tensor, labels: Tensor, index: Tensor) -> Tensor:
        """Return the loss and update the rows of the batch."""
        self.optimizer.zero_grad()
        u, v = self.table(index)  # (B, 1), (B, K)
        loss = published_loss(logits, labels, u, v, self.eps)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


class Candidate(NamedTuple):
    """One implementation of the table: its bytes, and a function that builds a step with a new table.

    A `settled` candidate gets the same few batches repeatedly, like those of a converged network: no class is new.
    """

    nbytes: Callable[[Sizes], int]
    build: Callable[[Sizes], Step]
    settled: bool = False


def _ours(layout: Layout, variant: Literal["flow", "official"]) -> Candidate:
    def build(sizes: Sizes) -> Step:
        batch_size = sizes.batch if variant == "official" else None
        sop = SOP(sizes.samples, sizes.classes, layout=layout, variant=variant, batch_size=batch_size, onset="always")
        for buffer in sop.table.buffers():
            buffer.add_(0)  # touch every page: the page fault of the first use is not part of a step
        return sop

    return Candidate(lambda sizes: sizes.samples * row_bytes(layout, sizes.classes), build)


def _baseline(table: type[DenseParameters] | type[SparseEmbedding], *, copies: int) -> Candidate:
    """`copies` is 2 if the gradients of u and v are dense, else 1."""

    def build(sizes: Sizes) -> Step:
        start, rates = NoiseTable(sizes.samples, sizes.classes, layout="dense"), Official()
        eps = SOP(1, sizes.classes).eps
        return AutogradStep(table(start.u, start.v), lr_u=rates.lr_u, lr_v=rates.lr_v, eps=eps)

    return Candidate(lambda sizes: copies * 4 * sizes.samples * (1 + sizes.classes), build)


OURS = {
    "slots, flow": _ours("slots", "flow"),
    "slots, official": _ours("slots", "official"),
    "dense, flow": _ours("dense", "flow"),
    "dense, official": _ours("dense", "official"),
}
SETTLED = "slots, flow, settled"
AUTHORS, CROSS_ENTROPY = "authors' dense parameters", "cross-entropy, no table"
CANDIDATES = {
    **OURS,
    SETTLED: _ours("slots", "flow")._replace(settled=True),
    AUTHORS: _baseline(DenseParameters, copies=2),
    "sparse embedding": _baseline(SparseEmbedding, copies=1),
    CROSS_ENTROPY: Candidate(lambda _: 0, lambda _: lambda logits, labels, _: cross_entropy(logits, labels)),
}
