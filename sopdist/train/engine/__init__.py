"""The network on all ranks: one engine per kind, the same interface for all of them.

    engine = make_engine(world, config.engine, network, optimizer, accumulate=2, clip=1.0, batch=64)
    for last, images in ...:
        with engine.micro_batch(last):
            engine.backward(loss_of(engine.forward(images)))
    engine.step()

An engine minimises the mean over ranks of the sum over micro-batches of the losses given to `backward`. Each rank
therefore passes (sum of its weighted losses) * ranks / (total weight over ranks): rank 0 with losses 1, 2 and rank 1
with loss 6 pass 3 * 2 / 3 = 2 and 6 * 2 / 3 = 4. Their mean is 3, the mean of the three samples.

An engine does not know about data, methods or files.
"""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from ..distributed.world import World
from ..settings import EngineSettings
from .base import Engine
from .ddp import DdpEngine
from .deepspeed import DeepSpeedEngine

__all__ = ["Engine", "make_engine"]


def make_engine(
    world: World,
    settings: EngineSettings,
    network: nn.Module,
    optimizer: Optimizer,
    *,
    accumulate: int,
    clip: float,
    batch: int,
) -> Engine:
    """Wrap the network for the kind of the world. Collective.

    `accumulate`: micro-batches per step. `clip`: largest norm of the gradient, 0 for no limit. `batch`: samples per
    micro-batch on this rank.
    """
    if world.kind == "deepspeed":
        return DeepSpeedEngine(world, settings, network, optimizer, accumulate=accumulate, clip=clip, batch=batch)
    return DdpEngine(world, settings, network, optimizer, clip=clip)
