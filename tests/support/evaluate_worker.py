"""A rank that evaluates a fixed network on a split, with several batch sizes, and writes the metrics to a file.

python -m tests.support.evaluate_worker SPLIT LABELS OUT
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from torch import nn

from sopdist.data.settings import DataSettings
from sopdist.train.distributed.world import World, find_launch_env, open_world
from sopdist.train.evaluate import close_all, evaluate, open_evaluations
from sopdist.train.settings import EngineSettings, EvaluateSettings
from tests.support.grey_images import CLASSES, SIDE

BATCHES = (5, 12, 60)  # none divides 53, the last is larger than the split


def network() -> nn.Module:
    """A network with arbitrary weights, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, 40), nn.ReLU(), nn.Linear(40, len(CLASSES))).eval()


def evaluations(world: World, split: Path, labels: str) -> dict[str, dict[str, float]]:
    """The metrics with each batch size."""
    found, model = {}, network()
    data = DataSettings("unused", "digits", threads=1, max_bad_fraction=0.5)
    for batch in BATCHES:
        streams = open_evaluations(EvaluateSettings({"all": str(split)}, labels), data, CLASSES, batch, world)
        found[str(batch)] = evaluate(model, streams["all"], world)
        close_all(streams)
    return found


def main() -> None:
    split, labels, out = sys.argv[-3:]
    world = open_world(find_launch_env(os.environ), EngineSettings(threads=1, timeout=60))
    found = evaluations(world, Path(split), labels)
    world.close()
    (Path(out) / f"rank{world.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
