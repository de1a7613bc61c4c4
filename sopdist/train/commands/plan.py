"""What a run will take, before anybody pays for a GPU: steps, memory and bytes on the wire for a number of ranks.

Nothing is trained. The data's sizes come from the manifest of the shards that the config names; where there are none
yet, --samples and --classes stand in for it. The network is built without memory for its weights.

    sopdist plan --cfg webvision --world-size 8 data.root=shards/webvision
    sopdist plan --cfg webvision_full --world-size 64 --samples 2439574 --classes 1000 data.root=later
    sopdist plan --cfg cifar10 --world-size 2 train.batch=256 --json

A step's bytes of the exchange are a mean: which samples belong to another rank differs from step to step.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...config import ConfigError
from ...data.augment.recipes import find_recipe
from ...data.commands.arguments import whole
from ...data.errors import DataError
from ...data.labels import UNKNOWN
from ...data.manifest import Manifest
from ...data.remote.opening import open_store
from ...data.settings import DataSettings
from ...data.store import Store
from ...noise.rates import Forecast
from .. import forecast
from ..config import Config, load
from ..forecast import DataSizes, NetworkSizes
from .plan_text import as_text


@dataclass(frozen=True)
class Found:
    """The sizes that the plan is made of, and where they come from."""

    data: DataSizes
    source: str
    shards: int | None
    shard_bytes: int | None
    network: NetworkSizes | None
    network_problem: str  # why it could not be built


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `sopdist plan`."""
    parser.intermixed = True  # type: ignore[attr-defined]
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="change the config, e.g. train.batch=256")
    parser.add_argument("--cfg", required=True, metavar="NAME_OR_PATH", help="a config: a file, or a name in configs/")
    parser.add_argument("--world-size", required=True, type=whole(1), metavar="W", help="number of ranks")
    parser.add_argument("--samples", type=whole(1), metavar="N", help="training samples, if there are no shards yet")
    parser.add_argument("--classes", type=whole(2), metavar="K", help="classes, if there are no shards yet")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(usage_error=parser.error)


def run(args: argparse.Namespace) -> int:
    """Print the plan."""
    if (args.samples is None) != (args.classes is None):
        args.usage_error("--samples and --classes stand in for a manifest together: give both, or neither")
    config = load(args.cfg, args.overrides)
    forecast.check_ranks(config, args.world_size)
    plan = make_plan(config, look_up(config, args.samples, args.classes), args.world_size)
    print(json.dumps(plan, indent=1) if args.json else as_text(plan))
    return 0


def look_up(config: Config, samples: int | None, classes: int | None) -> Found:
    """The sizes of data and network: from the shards if they are there, else as the user says."""
    recipe = find_recipe(config.data.recipe)
    shards = shard_bytes = None
    try:
        store = _store(config.data)
        manifest = store.manifest()
    except DataError as error:
        if samples is None or classes is None:
            raise DataError(
                f"{error}\nIf the shards are to be made later, give their numbers: --samples N --classes K"
            ) from None
        source, seen = "--samples and --classes", _balanced_at_most(config.data, samples, classes)
    else:
        source, samples, classes = store.root, manifest.samples, len(manifest.classes)
        shards, shard_bytes = len(manifest.shards), sum(shard.bytes for shard in manifest.shards)
        seen = _seen_in_an_epoch(config.data, store, manifest)
        store.close()
    if seen < 1:
        balanced = config.data.balanced_per_epoch
        raise ConfigError(f"data.balanced_per_epoch = {balanced}: fewer than one sample for each of {classes} classes")
    data = DataSizes(samples, classes, seen, _evaluation_sizes(config))
    network, problem = _network(config, 1 if recipe.grey else 3, recipe.size, classes)
    return Found(data, source, shards, shard_bytes, network, problem)


def make_plan(config: Config, found: Found, ranks: int) -> dict[str, Any]:
    """Everything that is known ahead, as plain values: the content of --json."""
    data, network = found.data, found.network
    steps = forecast.steps_of(config, data)
    table = forecast.table_of(config.objective, data, ranks)
    traffic = forecast.traffic_of(config, data, table, ranks)
    activation = forecast.activation_of(config, data, steps)
    engine = checkpoint = None
    if network is not None:
        in_bytes = forecast.engine_of(config, network, ranks)
        engine = {**asdict(in_bytes), "bytes": in_bytes.nbytes}
        size = forecast.checkpoint_bytes(config, network, table)
        # The best one stays, and the one being written is complete before the oldest goes. Networks come on top.
        saves = config.checkpoint.every or config.checkpoint.steps or config.checkpoint.minutes
        kept = config.checkpoint.keep + 2 if saves else 0
        checkpoint = {"bytes": size, "kept_bytes": kept * size + 2 * network.nbytes}
    return {
        "run": config.run.name,
        "world_size": ranks,
        "source": found.source,
        "data": {**asdict(data), "shards": found.shards, "shard_bytes": found.shard_bytes},
        "steps": asdict(steps),
        "shares": [asdict(share) for share in forecast.shares_of(config, ranks)],
        "table": None if table is None else asdict(table),
        "exchange": None if traffic is None else asdict(traffic),
        "activation": None if activation is None else _activation(activation),
        "learning_rate": [asdict(rate) for rate in forecast.course_of(config.optim, steps)],
        "evaluation": [asdict(evaluation) for evaluation in forecast.evaluations_of(config, data)],
        "network": None if network is None else {"name": config.model.name, **asdict(network)},
        "network_problem": found.network_problem,
        "engine": engine,
        "checkpoint": checkpoint,
    }


def _activation(activation: Forecast) -> dict[str, Any]:
    never = activation.visits == float("inf")  # which JSON cannot say
    return {
        "visits": None if never else activation.visits,
        "planned": activation.epochs,
        "activates": activation.activates,
        "advice": "" if activation.activates else str(activation),
    }


def _store(settings: DataSettings) -> Store:
    cache = Path(settings.cache) if settings.cache else None
    return open_store(settings.location, cache, settings.cache_bytes or None)


def _seen_in_an_epoch(settings: DataSettings, store: Store, manifest: Manifest) -> int:
    if not settings.balanced_per_epoch:
        return manifest.samples
    labels, classes = store.labels(manifest, settings.labels).labels, len(manifest.classes)
    counts = np.bincount(labels[labels != UNKNOWN], minlength=classes)
    return int(np.minimum(counts, settings.balanced_per_epoch // classes).sum())


def _balanced_at_most(settings: DataSettings, samples: int, classes: int) -> int:
    """Without labels nobody knows which classes are small."""
    if not settings.balanced_per_epoch:
        return samples
    return min(samples, settings.balanced_per_epoch // classes * classes)


def _evaluation_sizes(config: Config) -> dict[str, int | None]:
    from ..evaluate import data_of_split

    sizes: dict[str, int | None] = {}
    for name, split in config.evaluate.splits.items():
        try:
            store = _store(data_of_split(config.data, split))
            sizes[name] = store.manifest().samples
            store.close()
        except DataError:
            sizes[name] = None
    return sizes


def _network(config: Config, channels: int, size: int, classes: int) -> tuple[NetworkSizes | None, str]:
    """The network's sizes, or why they are not known."""
    import torch

    from ...models.factory import OURS, make_model

    # The sizes are the same without published weights, and nothing is fetched; that ours have none is told by them.
    pretrained = config.model.pretrained and config.model.name in OURS
    plain = replace(config.model, pretrained=pretrained, weights="")
    problem = ""
    for device in ("meta", "cpu"):  # a few networks compute while they are built, which the first cannot do
        try:
            with torch.device(device):
                model = make_model(plain, channels=channels, size=size, classes=classes)
            break
        except ConfigError as error:
            if error.__cause__ is None:  # the config is wrong; else it is this machine that cannot
                raise
            problem = str(error)
    else:
        return None, problem
    parameters = list(model.parameters())
    tensors = [*parameters, *model.buffers()]
    return NetworkSizes(
        parameters=sum(parameter.numel() for parameter in parameters),
        trained=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        nbytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
    ), ""
