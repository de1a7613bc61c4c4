"""Worker: saves and loads an awkward network under every ZeRO stage, and fails if anything differs afterwards.

torchrun ... -m tests.support.zero_worker FOLDER
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from sopdist.checkpoint import verify_checkpoint
from sopdist.checkpoint.fragments import distribute
from sopdist.checkpoint.writing import CheckpointWriter, save_fragments
from sopdist.train.distributed.world import World, find_launch_env, open_world
from sopdist.train.engine import Engine
from sopdist.train.engine import make_engine as wrap
from sopdist.train.optim import make_optimizer
from sopdist.train.saving.sections import EngineSection
from sopdist.train.settings import EngineSettings, OptimSettings
from tests.support.checkpoints import about

SIDE = 331  # a prime whose square exceeds the size below which ZeRO 3 does not partition


class Awkward(nn.Module):
    """Frozen weights in the middle, two layers with tied weights, a scalar parameter, odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(7, SIDE)
        self.frozen = nn.Linear(SIDE, SIDE).requires_grad_(False)
        self.norm = nn.BatchNorm1d(SIDE)
        self.tied = nn.Linear(SIDE, SIDE, bias=False)
        self.again = nn.Linear(SIDE, SIDE)
        self.again.weight = self.tied.weight
        self.scale = nn.Parameter(torch.ones(1))
        self.last = nn.Linear(SIDE, 3)

    def forward(self, values: Tensor) -> Tensor:
        hidden = self.norm(self.frozen(self.first(values)).relu())
        hidden = self.again(self.tied(hidden).relu()) * self.scale
        logits: Tensor = self.last(hidden)
        return logits


def make_engine(world: World, stage: int, optimizer: str) -> Engine:
    settings = EngineSettings(kind="deepspeed", zero=stage, threads=1, timeout=120)
    network = Awkward()
    optim = OptimSettings(name=optimizer, lr=0.01)
    return wrap(world, settings, network, make_optimizer(optim, network), accumulate=1, clip=0.0, batch=4)


def train(engine: Engine, world: World, steps: range) -> None:
    engine.train()
    for step in steps:
        generator = torch.Generator().manual_seed(step * 10 + world.rank)
        with engine.micro_batch(last=True):
            engine.backward(engine.forward(torch.randn(4, 7, generator=generator)).square().mean())
        engine.step()


def momenta(engine: Engine) -> dict[str, Tensor]:
    """The optimizer state of each weight, as gathered by DeepSpeed itself. Collective."""
    from deepspeed.utils import safe_get_full_optimizer_state

    inner = engine._wrapped.optimizer.optimizer
    keys = [key for key, value in next(iter(inner.state.values())).items() if torch.is_tensor(value) and value.dim()]
    return {
        f"{name}/{key}": safe_get_full_optimizer_state(parameter, key).clone()
        for name, parameter in engine.network.named_parameters()
        if parameter.requires_grad
        for key in keys
    }


def save(engine: Engine, world: World, folder: Path) -> None:
    content = EngineSection(engine, world).save()
    fragments = distribute(content.replicated, world.rank, world.size) | content.own
    save_fragments(fragments, CheckpointWriter(folder, world.rank, world.size, about(0, world.size)), world.control)


def check(world: World, folder: Path, stage: int, optimizer: str) -> None:
    """Save after two steps. The saved state equals DeepSpeed's, and a new engine that loads it trains identically."""
    engine = make_engine(world, stage, optimizer)
    train(engine, world, range(2))
    network, wanted = engine.network_state(), momenta(engine)
    save(engine, world, folder)
    saved = verify_checkpoint(folder)
    weights, kept = saved.section("network/"), saved.section("optimizer/")
    assert weights.keys() | engine.statistics().keys() == network.keys()
    assert all(torch.equal(weights[name], network[name]) for name in weights)
    steps = {name: value for name, value in kept.items() if value.dim() == 0 and name.endswith("/step")}
    assert kept.keys() - steps.keys() == wanted.keys(), sorted(kept.keys() ^ wanted.keys())
    assert all(torch.equal(kept[name], wanted[name].view_as(kept[name])) for name in wanted)
    assert bool(steps) == (optimizer == "adamw")
    assert all(float(value) == 2 for value in steps.values())
    other = make_engine(world, stage, optimizer)
    other.load_network_state(saved.section("network/") | saved.statistics(world.rank))
    other.load_optimizer_state(kept)
    for one in (engine, other):
        train(one, world, range(2, 4))
    found, expected = other.network_state(), engine.network_state()
    different = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not different, different
    assert torch.equal(found["frozen.weight"], Awkward().frozen.weight)
    assert torch.equal(found["again.weight"], found["tied.weight"])


def check_fresh_optimizer(world: World, folder: Path, stage: int, optimizer: str) -> None:
    """An optimizer that starts without state, as after a resume with another one, saves its state from then on."""
    engine = make_engine(world, stage, optimizer)
    engine.load_optimizer_state({})
    train(engine, world, range(1))
    save(engine, world, folder)
    kept, wanted = verify_checkpoint(folder).section("optimizer/"), momenta(engine)
    assert wanted
    assert {name for name in kept if not name.endswith("/step")} == wanted.keys(), sorted(kept.keys() ^ wanted.keys())
    other = make_engine(world, stage, optimizer)
    other.load_network_state(engine.network_state())
    other.load_optimizer_state(kept)
    for one in (engine, other):
        train(one, world, range(1, 2))
    found, expected = momenta(other), momenta(engine)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def main() -> None:
    folder = Path(sys.argv[-1])
    world = open_world(find_launch_env(os.environ), EngineSettings(kind="deepspeed", threads=1, timeout=120))
    for stage in (1, 2, 3):
        for optimizer in ("sgd", "adamw"):
            check(world, folder / f"zero-{stage}-{optimizer}", stage, optimizer)
            check_fresh_optimizer(world, folder / f"zero-{stage}-{optimizer}-fresh", stage, optimizer)
            if world.rank == 0:
                print(f"ZeRO {stage}, {optimizer}: identical", flush=True)
    world.close()


if __name__ == "__main__":
    main()
