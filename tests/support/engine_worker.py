"""A rank that trains a small network through the engine, as the jobs in a JSON file say, and saves the results.

    python -m tests.support.engine_worker JOBS.json      [{"kind": "ddp", "zero": 0, "out": "a.pt", ...}, ...]

All jobs of a file have the same kind, so that they can share a world.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from sopdist.checkpoint import verify_checkpoint
from sopdist.checkpoint.fragments import Fragment, distribute
from sopdist.checkpoint.writing import CheckpointWriter, save_fragments
from sopdist.train.distributed.world import World, find_launch_env, open_world
from sopdist.train.engine import Engine, make_engine
from sopdist.train.optim import make_optimizer
from sopdist.train.settings import EngineSettings, OptimSettings

BATCH, CLASSES = 12, 5  # samples per step over all ranks


def network(norm: bool = False) -> nn.Sequential:
    """Small, but with one layer that ZeRO-3 partitions (it does not partition those below 100,000 weights)."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 8 * 8, 257)]
    layers += [nn.BatchNorm1d(257)] if norm else []
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(257, CLASSES))


def samples(step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Images, labels and weights of a step. One weight is 0, so that the ranks' total weights differ."""
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(BATCH, 3, 8, 8, generator=generator)
    labels = torch.randint(CLASSES, (BATCH,), generator=generator)
    weight = torch.ones(BATCH)
    weight[step % BATCH] = 0
    return images, labels, weight


def share(values: Tensor, rank: int, size: int) -> Tensor:
    """A rank's share, of uneven length: two ranks get 7 and 5 of 12 samples."""
    cut = [0, 7, BATCH] if size == 2 else [0, *(BATCH * (r + 1) // size for r in range(size))]
    return values[cut[rank] : cut[rank + 1]]


def train(
    engine: Engine, world: World, first: int, steps: int, micro_batches: int, lr: float, overflow: int = -1
) -> list[float | None]:
    """Train `steps` steps and return the gradient norms. In step `overflow` the last sample is not finite.

    Samples whose logits are not finite are left out of the loss, as in training.
    """
    norms = []
    engine.train()
    engine.set_lr(lr)
    for step in range(first, first + steps):
        batch = samples(step)
        if step == overflow:
            batch[0][-1].fill_(torch.inf)
        parts = [share(values, world.rank, world.size).tensor_split(micro_batches) for values in batch]
        total = world.sum([float(sum(weight.sum() for weight in parts[2]))])[0]
        for n, (images, labels, weight) in enumerate(zip(*parts, strict=True)):
            with engine.micro_batch(last=n == micro_batches - 1):
                logits = engine.forward(images)
                bad = ~logits.isfinite().all(1)
                losses = nn.functional.cross_entropy(logits.masked_fill(bad[:, None], 0.0), labels, reduction="none")
                engine.backward((losses * weight * ~bad).sum() * world.size / total)
        assert engine.step() or step == overflow
        norms.append(engine.grad_norm())
    return norms


def saved_optimizer(engine: Engine, folder: Path) -> dict[str, Tensor]:
    """Full optimizer state, after all ranks saved it together and it was read back. Collective."""
    world = engine.world
    about = {"step": 0, "ranks": world.size, "best": 0.0, "engine": "", "fingerprint": {}, "config": {}}
    save_fragments(_fragments(engine), CheckpointWriter(folder, world.rank, world.size, about), world.control)
    saved, network = verify_checkpoint(folder), engine.network_state()
    weights = saved.section("network/")
    assert weights.keys() | engine.statistics().keys() == network.keys()
    assert all(torch.equal(value, network[name]) for name, value in weights.items())
    return saved.section("optimizer/")


def _fragments(engine: Engine) -> dict[str, Fragment]:
    """What this rank writes of a checkpoint: its share of the replicated tensors, and its own fragments."""
    replicated = {
        "network": engine.replicated_network(),
        "optimizer": engine.replicated_optimizer(),
        "last_finite_statistics": engine.last_finite_statistics(),
    }
    named = {f"{section}/{name}": value for section, state in replicated.items() for name, value in state.items()}
    network, optimizer = engine.own_fragments()
    own = {f"network/{name}": fragment for name, fragment in network.items()}
    own |= {f"optimizer/{name}": fragment for name, fragment in optimizer.items()}
    assert not named.keys() & own.keys()
    return distribute(named, engine.world.rank, engine.world.size) | own


def compiled_graphs() -> int:
    """Number of graphs that torch.compile has compiled in this process."""
    return int(counters["stats"]["unique_graphs"])


def run(job: dict[str, Any], world: World) -> None:
    settings = EngineSettings(
        kind=job["kind"], zero=job.get("zero", 0), precision=job.get("precision", "fp32"), threads=1, timeout=120,
        compile=job.get("compile", False),
    )  # fmt: skip
    optim = OptimSettings(name=job.get("optimizer", "sgd"), lr=0.5, weight_decay=1e-2)
    model = network(job.get("norm", False))
    micro_batches, steps, clip = job.get("micro_batches", 1), job.get("steps", 3), job.get("clip", 0.0)
    engine = make_engine(
        world, settings, model, make_optimizer(optim, model), accumulate=micro_batches, clip=clip, batch=3
    )
    if "load" in job:
        loaded = torch.load(job["load"], weights_only=True)
        engine.load_network_state(loaded["network"])
        engine.load_optimizer_state(loaded["optimizer"])
    lr, overflow = job.get("lr", 0.1), job.get("overflow", -1)
    norms = train(engine, world, job.get("first", 0), steps, micro_batches, lr, overflow)
    if job.get("norm"):
        engine.average_statistics()
    engine.eval()
    with torch.no_grad():
        logits = engine.forward(samples(99)[0])
    Path(job["out"]).parent.mkdir(parents=True, exist_ok=True)
    result = {
        "network": engine.network_state(), "optimizer": saved_optimizer(engine, Path(f"{job['out']}.saved")),
        "norms": norms, "logits": logits, "graphs": compiled_graphs(),
    }  # fmt: skip
    torch.save(result, f"{job['out']}.rank{world.rank}")


def main() -> None:
    jobs = json.loads(Path(sys.argv[-1]).read_text())
    world = open_world(find_launch_env(os.environ), EngineSettings(kind=jobs[0]["kind"], threads=1, timeout=120))
    assert world.kind == jobs[0]["kind"]
    for job in jobs:
        run(job, world)
    world.close()


if __name__ == "__main__":
    main()
