"""Evaluate the network of a run, or of one of its checkpoints, on any splits.

  sopdist eval runs/cifar10                                  the best network, or the last, on the splits of the config
  sopdist eval runs/cifar10 --which last --split test
  sopdist eval runs/webvision --split ilsvrc12=shards/ilsvrc12/val
  sopdist eval runs/cifar10/checkpoints/step-00004224

A run keeps a best network if it had a split to select it on. A split is a folder inside the run's data.root, or the
path or URL of another split with the same classes; NAME= gives it a name. Several processes can share the work:
torchrun --nproc-per-node 8 -m sopdist eval ...

exit codes: 0 evaluated, 1 data or files, 2 config, 70 another rank was lost, 130 interrupted
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import DataError
from ..arguments import integer
from ..tables import format_table

if TYPE_CHECKING:
    from torch import Tensor

    from ...data.stream import Stream
    from ...train.config import Config
    from ...train.distributed.world import World


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `sopdist eval`."""
    parser.add_argument("folder", type=Path, metavar="RUN_OR_CHECKPOINT", help="folder of a run or a checkpoint")
    about = "split to evaluate on; may be given several times (default: the splits of the run's config)"
    parser.add_argument("--split", action="append", default=[], metavar="[NAME=]SPLIT", help=about)
    parser.add_argument(
        "--which",
        choices=("best", "last", "ema"),
        help="network of the run (default: best if there is one); ema: the average of its weights",
    )
    parser.add_argument("--labels", metavar="SET", help="label set of the splits (default: evaluate.labels of the run)")
    parser.add_argument("--root", metavar="FOLDER", help="folder of the shards, if the run's data.root has moved")
    parser.add_argument("--batch", type=integer(1), metavar="N", help="batch size (default: as in the run)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Evaluate; returns the exit code. Rank 0 prints the result. If a rank fails, the others do not wait for it."""
    import os

    from ...train.distributed.launch_env import find_launch_env
    from ...train.distributed.run_ranks import OK, run_ranks
    from ...train.settings import EngineSettings

    printed: list[str] = []

    def work(world: World) -> int:
        text = evaluate_on_ranks(args, world)
        printed.extend([text] if world.rank == 0 else [])
        return OK

    code = run_ranks(find_launch_env(os.environ), EngineSettings(), work)
    if code == OK:
        print("\n".join(printed), end="\n" if printed else "")
    return code


def evaluate_on_ranks(args: argparse.Namespace, world: World) -> str:
    """Evaluate and return the text to print. Collective: an error on any rank is a CollectiveError on every rank."""
    import torch

    from ...train.evaluate import close_all, count, rates

    # Rank 0 chooses for all ranks: a run that is still training may write a better network at any time.
    chosen = world.on_rank0(lambda: [str(path) for path in find_network(args.folder, args.which)])
    folder, weights = (Path(text) for text in chosen)
    config = world.on_all_ranks(lambda: _config(args, folder))
    if config.engine.threads:
        torch.set_num_threads(config.engine.threads)
    predict, streams = world.on_all_ranks(lambda: _open(config, weights, world))
    found = {}
    try:
        with torch.inference_mode():
            for name, stream in streams.items():
                # Each rank has the full network, so that ranks communicate only to sum the results.
                mine = world.on_all_ranks(partial(count, predict, stream, world.device))
                found[name] = rates(world.sum(mine), len(stream.split.manifest.classes))
    finally:
        close_all(streams)
    return json.dumps({"network": str(weights), **found}, indent=1) if args.json else _table(weights, found)


def _config(args: argparse.Namespace, folder: Path) -> Config:
    """The run's config, with the overrides from the command line."""
    from ...train.config import read_config
    from ...train.record.run_folder import CONFIG

    def ignore(_: str) -> None:
        """The notes ask to edit the file, but this is the record of a run, and every rank reads it."""

    config = read_config(folder / CONFIG, [f"data.root={args.root}"] if args.root else [], note=ignore)
    splits = named_splits(args.split) or config.evaluate.splits
    label_sets = {} if args.labels else config.evaluate.label_sets
    evaluate = replace(
        config.evaluate,
        splits=splits,
        labels=args.labels or config.evaluate.labels,
        label_sets={name: labels for name, labels in label_sets.items() if name in splits},
        batch=args.batch or config.evaluate.batch or config.train.batch,
    )
    if not evaluate.splits:
        raise DataError(f"{folder}: its config has no evaluate.splits; name a split with --split")
    return replace(config, evaluate=evaluate)


def _open(config: Config, weights: Path, world: World) -> tuple[Callable[[Tensor], Tensor], dict[str, Stream]]:
    """Load the network to this rank's device and open one stream per split; returns how the method predicts."""
    from ...data.augment.recipes import find_recipe
    from ...methods import make_method
    from ...models import make_model
    from ...train.evaluate import open_evaluations
    from ...train.session import data_for_rank

    state, classes = _weights(weights), _classes(config)
    recipe = find_recipe(config.data.recipe)
    bare = replace(config.model, pretrained=False, weights="")
    channels = 1 if recipe.grey else 3
    method = make_method(config.method)
    network = method.build_network(lambda: make_model(bare, channels=channels, size=recipe.size, classes=len(classes)))
    try:
        network.load_state_dict(state)
    except RuntimeError as error:
        raise DataError(f"{weights}: does not fit model.name = {config.model.name}: {error}") from None
    network.to(world.device).eval()
    data = data_for_rank(config.data, world)
    return partial(method.predict, network), open_evaluations(
        config.evaluate, data, classes, config.evaluate.batch, world
    )


def find_network(path: Path, which: str | None) -> tuple[Path, Path]:
    """The run's folder and its network: `path` if it is a checkpoint, else the file of the best or last network."""
    from ...checkpoint.folder import is_complete
    from ...train.record.run_folder import CONFIG
    from ...train.saving.saver import BEST, LAST, LAST_AVERAGE

    if is_complete(path):
        if which is not None:
            raise DataError(f"--which {which}: only for a run; {path} is a checkpoint, which has one network")
        return path.parent.parent, path
    if not (path / CONFIG).is_file():
        raise DataError(f"{path}: neither a run nor a complete checkpoint")
    for name in {"best": (BEST,), "last": (LAST,), "ema": (LAST_AVERAGE,), None: (BEST, LAST)}[which]:
        if (path / name).is_file():
            return path, path / name
    if which == "best" and (path / LAST).is_file():
        raise DataError(f"{path}: has no {BEST}, because no split was named to select it; --which last uses {LAST}")
    if which == "ema" and (path / LAST).is_file():
        raise DataError(f"{path}: has no {LAST_AVERAGE}, because it was trained without train.ema")
    raise DataError(f"{path}: has no {LAST} yet; name one of its checkpoints, or let the run finish")


def _weights(path: Path) -> dict[str, Tensor]:
    """Read the network's weights from a file or a checkpoint."""
    from ...checkpoint import verify_checkpoint
    from ...checkpoint.tensor_file import read_tensors

    return verify_checkpoint(path).network() if path.is_dir() else read_tensors(path)


def named_splits(texts: list[str]) -> dict[str, str]:
    """Parse --split: `test` -> {test: test}, `imagenet=a/b` -> {imagenet: a/b}, `a/b` -> {b: a/b}."""
    splits = {}
    for text in texts:
        name, equals, location = text.partition("=")
        named = equals and "/" not in name
        splits[name if named else text.rstrip("/").rpartition("/")[2]] = location if named else text
    return splits


def _classes(config: Config) -> tuple[str, ...]:
    """Class names of the training split, in the order of the network's outputs."""
    from ...data.remote.opening import open_store

    store = open_store(config.data.location, Path(config.data.cache) if config.data.cache else None)
    try:
        return store.manifest().classes
    finally:
        store.close()


def _table(weights: Path, found: dict[str, dict[str, float]]) -> str:
    rows = []
    for name, values in found.items():
        top5 = f"{values['top5']:.2%}" if "top5" in values else ""
        rows.append([name, f"{values['top1']:.2%}", top5, f"{values['loss']:.3f}", f"{values['samples']:,.0f}"])
    return f"{weights}\n{format_table(['split', 'top-1', 'top-5', 'loss', 'samples'], rows)}"
