"""The oracle of the trainer: the same training as a plain PyTorch loop in one process.

No engine, no ranks, no exchange, no micro-batches, no padding: each step takes a full batch of the plan, with an
optimizer of torch, and SOP as in its docstring.

Ranks sum gradients in another order, so results differ in the last bit. Most trainings amplify this: sooner or later
the input of a ReLU is so close to zero that the last bit decides its sign, and the gradient jumps. Seed and learning
rate are chosen so that this does not happen within these steps. `nudge`, which changes the last bit of every initial
weight, verifies that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sopdist import SOP
from sopdist.data.augment.policy import Policy
from sopdist.data.settings import DataSettings
from sopdist.data.stream import Stream
from sopdist.models import make_model
from sopdist.models.settings import ModelSettings
from tests.support.records import columns_of

BATCH, STEPS, EPOCHS = 61, 50, 3  # 24 batches per epoch, the last one padded; 61 is prime
RATE, MOMENTUM, DECAY = 0.01, 0.9, 5e-4
SEED, VISITS = 2, 2.0


@dataclass(frozen=True)
class Trained:
    """The result of a training."""

    losses: list[float]
    samples: list[list[int]]  # indices of each step, sorted
    table: dict[str, Tensor]
    weights: dict[str, Tensor]


def train_plain_loop(digits: Path, *, seed: int = SEED, nudge: int | None = None, **plus: Any) -> Trained:
    """Train. `plus`: consistency and balance of SOP+. `nudge`: seed for the signs by which the last bits change."""
    torch.manual_seed(seed)
    model = make_model(ModelSettings("small_conv"), channels=1, size=8, classes=10)
    if nudge is not None:
        draw = torch.Generator().manual_seed(nudge)
        with torch.no_grad():
            for weight in model.parameters():
                weight.copy_(torch.nextafter(weight, torch.randn(weight.shape, generator=draw).sign() * float("inf")))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM, weight_decay=DECAY)
    data = DataSettings(str(digits), "digits", split="train", labels="sym-0.4-seed0", threads=1)
    losses, samples = [], []
    with Stream(data, BATCH, seed, views=(None, Policy()) if plus.get("consistency") else (None,)) as stream:
        sop = SOP(len(stream.split), 10, visits=VISITS, onset="always", seed=seed, **plus)
        batches = (batch for epoch in range(EPOCHS) for batch in stream.epoch(epoch))
        for step, batch in zip(range(STEPS), batches, strict=False):
            real = batch.weight > 0
            views = [view[real] for view in (batch.images, *batch.other_views)]
            logits = model(torch.cat(views)).tensor_split(len(views))
            loss = sop(logits[0], batch.labels[real], batch.index[real], logits2=logits[1] if len(views) > 1 else None)
            optimizer.param_groups[0]["lr"] = RATE * (1 + math.cos(math.pi * step / STEPS)) / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            samples.append(sorted(batch.index[real].tolist()))
    weights = {name: value.detach() for name, value in model.named_parameters()}
    return Trained(losses, samples, columns_of(sop.table), weights)


def overrides(digits: Path) -> list[str]:
    """The same training as overrides of a config."""
    return [
        f"data.root={digits}", "model.name=small_conv", f"train.batch={BATCH}", f"train.epochs={EPOCHS}",
        f"train.max_steps={STEPS}", f"optim.lr={RATE}", f"optim.momentum={MOMENTUM}", f"optim.weight_decay={DECAY}",
        "optim.schedule=cosine", f"run.seed={SEED}", f"method.visits={VISITS}",
        "method.onset=always", "engine.kind=auto",
        "engine.threads=1", "evaluate.every=99", "checkpoint.every=99", "log.every=1", "log.wandb=off",
    ]  # fmt: skip
