"""Evaluate the network of a run, or of one of its checkpoints, on any splits.

  sopdist eval runs/cifar10                                  its best network, or its last, on its config's splits
  sopdist eval runs/cifar10 --which last --split test
  sopdist eval runs/webvision --split ilsvrc12=shards/ilsvrc12/val
  sopdist eval runs/cifar10/checkpoints/step-00004224

A run keeps a best network if it had a split to choose it by. A split is a folder inside of the run's data.root, or the
path or URL of another one with the same classes; NAME= in front gives it a name. Several processes share the work:
torchrun --nproc-per-node 8 -m sopdist eval ...

exit codes: 0 evaluated, 1 data or files, 2 config, 70 another rank was lost, 130 interrupted
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ...data.commands.arguments import whole
from ...data.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ...data.stream import Stream
    from ..config import Config
    from ..world import World


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `sopdist eval`."""
    parser.add_argument("folder", type=Path, metavar="RUN_OR_CHECKPOINT", help="folder of a run or of a checkpoint")
    where = "evaluate on this one; may be given several times (default: those of the run's config)"
    parser.add_argument("--split", action="append", default=[], metavar="[NAME=]SPLIT", help=where)
    parser.add_argument("--which", choices=("best", "last"), help="network of a run (default: best if there is one)")
    parser.add_argument("--labels", metavar="SET", help="label set of the splits (default: evaluate.labels of the run)")
    parser.add_argument("--root", metavar="FOLDER", help="where the shards are now, instead of the run's data.root")
    parser.add_argument("--batch", type=whole(1), metavar="N", help="samples at a time (default: as in the run)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Evaluate; returns the exit code. Rank 0 speaks for all, and no rank waits for one that will not come."""
    import os

    from ..place import find_place
    from ..settings import EngineSettings
    from ..together import OK, work_together

    printed: list[str] = []

    def work(world: World) -> int:
        text = evaluate_together(args, world)
        printed.extend([text] if world.rank == 0 else [])
        return OK

    code = work_together(find_place(os.environ), EngineSettings(), work)
    if code == OK:
        print("\n".join(printed), end="\n" if printed else "")
    return code


def evaluate_together(args: argparse.Namespace, world: World) -> str:
    """What is to be printed. Collective: a mistake that any rank finds is a TogetherError on all."""
    import torch

    from ..evaluate import close_all, count, rates

    # Rank 0 chooses for all: a run that still goes on may write a better network just now.
    chosen = world.on_first(lambda: [str(path) for path in find_network(args.folder, args.which)])
    folder, weights = (Path(text) for text in chosen)
    config = world.agree(lambda: _config(args, folder))
    if config.engine.threads:
        torch.set_num_threads(config.engine.threads)
    network, streams = world.agree(lambda: _open(config, weights, world))
    found = {}
    try:
        with torch.inference_mode():
            for name, stream in streams.items():
                # The network is whole on each rank, so that none needs another before the sums.
                mine = world.agree(partial(count, network, stream, world.device))
                found[name] = rates(world.sum(mine), len(stream.split.manifest.classes))
    finally:
        close_all(streams)
    return json.dumps({"network": str(weights), **found}, indent=1) if args.json else _table(weights, found)


def _config(args: argparse.Namespace, folder: Path) -> Config:
    """The run's config, with what the command line changes of it."""
    from ...config import load_config
    from ..config import Config
    from ..run_folder import CONFIG

    config = load_config(Config, folder / CONFIG, [f"data.root={args.root}"] if args.root else [])
    wanted = replace(
        config.evaluate,
        splits=named_splits(args.split) or config.evaluate.splits,
        labels=args.labels or config.evaluate.labels,
        batch=args.batch or config.evaluate.batch or config.train.batch,
    )
    if not wanted.splits:
        raise DataError(f"{folder}: its config names no evaluate.splits; name one with --split")
    return replace(config, evaluate=wanted)


def _open(config: Config, weights: Path, world: World) -> tuple[nn.Module, dict[str, Stream]]:
    """The network on this rank's device, and a stream for each split."""
    from ...data.augment.recipes import find_recipe
    from ...models import make_model
    from ..evaluate import open_evaluations
    from ..session import data_for_rank

    state, classes = _weights(weights), _classes(config)
    recipe = find_recipe(config.data.recipe)
    bare = replace(config.model, pretrained=False, weights="")
    network = make_model(bare, channels=1 if recipe.grey else 3, size=recipe.size, classes=len(classes))
    try:
        network.load_state_dict(state)
    except RuntimeError as error:
        raise DataError(f"{weights}: does not fit model.name = {config.model.name}: {error}") from None
    network.to(world.device).eval()
    data = data_for_rank(config.data, world)
    return network, open_evaluations(config.evaluate, data, classes, config.evaluate.batch, world)


def find_network(path: Path, which: str | None) -> tuple[Path, Path]:
    """The run's folder, and its network: a file, `which` or the best if there is one, or a checkpoint."""
    from ...checkpoint.folder import is_complete
    from ..checkpoint import BEST, LAST
    from ..run_folder import CONFIG

    if is_complete(path):
        return path.parent.parent, path
    if not (path / CONFIG).is_file():
        raise DataError(f"{path}: neither a run nor a checkpoint that is complete")
    for name in {"best": (BEST,), "last": (LAST,), None: (BEST, LAST)}[which]:
        if (path / name).is_file():
            return path, path / name
    if which == "best" and (path / LAST).is_file():
        raise DataError(f"{path}: has no {BEST}, because no split was named to choose it by; --which last takes {LAST}")
    raise DataError(f"{path}: has no {LAST} yet; name one of its checkpoints, or let the run finish")


def _weights(where: Path) -> dict[str, Tensor]:
    """Of a file or a checkpoint."""
    from ...checkpoint import verify_checkpoint
    from ...checkpoint.tensor_file import read_tensors

    return verify_checkpoint(where).network() if where.is_dir() else read_tensors(where)


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
