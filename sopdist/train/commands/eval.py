"""Evaluate the network of a run, or of one of its checkpoints, on any splits.

  sopdist eval runs/cifar10                                  its best network, on the splits of its config
  sopdist eval runs/cifar10 --which last --split test
  sopdist eval runs/webvision --split ilsvrc12=shards/ilsvrc12/val
  sopdist eval runs/cifar10/checkpoints/step-00004224

A split is a folder inside of the run's data.root, or the path or URL of another one with the same classes; NAME= in
front gives it a name. Several processes share the work: torchrun --nproc-per-node 8 -m sopdist eval ...
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from ...data.errors import DataError

if TYPE_CHECKING:
    from ..config import Config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `sopdist eval`."""
    parser.add_argument("folder", type=Path, metavar="RUN_OR_CHECKPOINT", help="folder of a run or of a checkpoint")
    where = "evaluate on this one; may be given several times (default: those of the run's config)"
    parser.add_argument("--split", action="append", default=[], metavar="[NAME=]SPLIT", help=where)
    parser.add_argument("--which", choices=("best", "last"), default="best", help="network of a run (default best)")
    parser.add_argument("--labels", metavar="SET", help="label set of the splits (default: as in the run)")
    parser.add_argument("--root", metavar="FOLDER", help="where the shards are now, instead of the run's data.root")
    parser.add_argument("--batch", type=int, metavar="N", help="samples at a time (default: as in the run)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Evaluate; returns the exit code."""
    import os
    from dataclasses import replace

    import torch

    from ...config import load_config
    from ...data.augment.recipes import find_recipe
    from ...models import make_model
    from ..checkpoint import read_tensors
    from ..config import Config
    from ..evaluate import close_all, evaluate, open_evaluations
    from ..run_folder import CONFIG
    from ..settings import EngineSettings
    from ..world import find_place, open_world

    folder, weights = find_network(args.folder, args.which)
    config = load_config(Config, folder / CONFIG, [f"data.root={args.root}"] if args.root else [])
    settings = replace(config.evaluate, splits=named_splits(args.split) or config.evaluate.splits)
    if args.labels:
        settings = replace(settings, labels=args.labels)
    if not settings.splits:
        raise DataError(f"{folder}: its config names no evaluate.splits; name one with --split")
    state = read_tensors(weights)
    world = open_world(find_place(os.environ), EngineSettings(threads=config.engine.threads))
    classes = _classes(config)
    recipe = find_recipe(config.data.recipe)
    bare = replace(config.model, pretrained=False, weights="")
    network = make_model(bare, channels=1 if recipe.grey else 3, size=recipe.size, classes=len(classes))
    try:
        network.load_state_dict(state)
    except RuntimeError as error:
        raise DataError(f"{weights}: does not fit model.name = {config.model.name}: {error}") from None
    network.to(world.device).eval()
    streams = open_evaluations(
        settings, config.data, classes, args.batch or settings.batch or config.train.batch, world
    )
    try:
        with torch.inference_mode():
            found = {name: evaluate(network, stream, world) for name, stream in streams.items()}
    finally:
        close_all(streams)
    if world.rank == 0:
        print(json.dumps({"network": str(weights), **found}, indent=1) if args.json else _table(weights, found))
    world.close()
    return 0


def find_network(path: Path, which: str) -> tuple[Path, Path]:
    """The run's folder, and the file of the network that is meant."""
    from ..checkpoint import BEST, LAST, NETWORK, STATE
    from ..run_folder import CONFIG

    if (path / STATE).is_file() and (path / NETWORK).is_file():
        return path.parent.parent, path / NETWORK
    if not (path / CONFIG).is_file():
        raise DataError(f"{path}: neither a run nor a checkpoint: it has no {CONFIG} and no {STATE}")
    for name in (BEST, LAST) if which == "best" else (LAST,):
        if (path / name).is_file():
            return path, path / name
    raise DataError(f"{path}: has no {LAST} yet; name one of its checkpoints, or let the run finish")


def named_splits(texts: list[str]) -> dict[str, str]:
    """`test` -> {test: test}, `imagenet=a/b` -> {imagenet: a/b}, `a/b` -> {b: a/b}."""
    splits = {}
    for text in texts:
        name, equals, place = text.partition("=")
        plain = equals and "/" not in name
        splits[name if plain else text.rstrip("/").rpartition("/")[2]] = place if plain else text
    return splits


def _classes(config: Config) -> tuple[str, ...]:
    """Of the training split, to which the network's outputs belong."""
    from ...data.remote.opening import open_store

    store = open_store(config.data.location, Path(config.data.cache) if config.data.cache else None)
    try:
        return store.manifest().classes
    finally:
        store.close()


def _table(weights: Path, found: dict[str, dict[str, float]]) -> str:
    lines = [str(weights), f"{'split':24}{'top-1':>8}{'top-5':>8}{'loss':>8}{'samples':>10}"]
    for name, values in found.items():
        top5 = f"{values['top5']:8.2%}" if "top5" in values else f"{'':8}"
        lines.append(f"{name:24}{values['top1']:8.2%}{top5}{values['loss']:8.3f}{values['samples']:10,.0f}")
    return "\n".join(lines)
