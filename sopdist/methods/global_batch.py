"""The batch of all ranks, for methods that compare or mix its samples.

Two ranks with a global batch of samples a b | c d: rank 0 has positions 0 and 1, rank 1 has 2 and 3. `gather` gives
every rank the values of all four, in this order, so that both choose the same samples and partners.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from ..data.plan import parts_of_ranks
from .method import Setup


class GlobalBatch:
    """Where this rank's batch lies in the batch of all ranks, and a count of steps for random numbers.

    Call `announce` with every planned batch, and `finish` after its step.
    """

    def __init__(self, setup: Setup) -> None:
        self.seed, self.device = setup.seed, setup.device
        self.ranks, self._group = setup.ranks, setup.group
        self._rank = 0 if setup.group is None else dist.get_rank(setup.group)
        self._announced: deque[list[NDArray[np.int64]]] = deque()
        self.counters = torch.zeros(2, dtype=torch.int64)  # steps of the run and of the epoch; part of its state

    def announce(self, batch: NDArray[np.integer[Any]]) -> list[NDArray[np.int64]]:
        """Announce a batch that will be computed; returns the samples of each rank."""
        parts = parts_of_ranks(batch, self.ranks)
        self._announced.append(parts)
        return parts

    def finish(self) -> None:
        """Count a step, and drop its batch."""
        if self._announced:
            self._announced.popleft()
        self.counters += 1

    def discard(self) -> None:
        """Drop announced batches: they will not be computed."""
        self._announced.clear()

    def begin_epoch(self) -> None:
        """Count the steps of the epoch from 0. Do not call it for an epoch that is resumed."""
        self.counters[1] = 0

    @property
    def step(self) -> int:
        """The step of the run, from 0."""
        return int(self.counters[0])

    @property
    def step_of_epoch(self) -> int:
        """The step of the epoch, from 0."""
        return int(self.counters[1])

    @property
    def sizes(self) -> list[int]:
        """The number of samples on each rank."""
        return [len(part) for part in self._announced[0]]

    @property
    def total(self) -> int:
        """The number of samples on all ranks, including padding."""
        return sum(self.sizes)

    @property
    def mine(self) -> slice:
        """The positions of this rank's samples."""
        first = sum(self.sizes[: self._rank])
        return slice(first, first + self.sizes[self._rank])

    def gather(self, values: Tensor) -> Tensor:
        """The values (total, ...) of all ranks from those of this rank (B, ...), without gradients. Collective."""
        values = values.detach()
        if self._group is None:
            return values
        sizes = self.sizes
        padded = values.new_zeros(max(sizes), *values.shape[1:])
        padded[: len(values)] = values
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=self._group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def sum(self, values: Tensor) -> Tensor:
        """The sum of each rank's values, without gradients. Collective."""
        values = values.detach().clone()
        if self._group is not None:
            dist.all_reduce(values, group=self._group)
        return values

    def loss_of_sum(self, share: Tensor, loss: Callable[[Tensor], Tensor]) -> Tensor:
        """This rank's share of `loss(total)`, where `total` is the sum of `share` over ranks; differentiable.

        The results of all ranks add up to the loss, and their gradients to its gradient. Collective.
        """
        total = self.sum(share).requires_grad_()
        value = loss(total)
        (slope,) = torch.autograd.grad(value, total)
        linear = (slope * share).sum()
        return linear + (value.detach() / self.ranks - linear).detach()

    def draws(self, stream: int) -> np.random.Generator:
        """Random numbers of this step, the same on every rank. Every purpose has a stream of its own, from 3 on."""
        return np.random.Generator(np.random.Philox(key=self.seed, counter=[0, 0, self.step, stream]))
