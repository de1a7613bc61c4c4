"""Predict the cost of a run: steps, memory and network traffic for a given number of ranks.

Does not train. The size of the data comes from the manifest of the shards that the config names. If you have no shards
yet, give --samples and --classes. The network is built on the meta device, without memory for its weights.

    sopdist plan --cfg webvision --world-size 8 data.root=shards/webvision
    sopdist plan --cfg webvision_full --world-size 64 --samples 2439574 --classes 1000 data.root=later
    sopdist plan --cfg cifar10 --world-size 2 train.batch=256 --json

Bytes per step are a mean: the number of samples that another rank owns varies from step to step.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...data.augment.recipes import find_recipe
from ...data.labels import UNKNOWN
from ...data.manifest import Manifest
from ...data.remote.opening import open_store
from ...data.settings import DataSettings
from ...data.store import Store
from ...errors import ConfigError, DataError
from ...methods import make_method
from ...train import forecast
from ...train.config import Config, load
from ...train.forecast import DataSizes, NetworkSizes
from ..arguments import integer
from .plan_text import as_text


@dataclass(frozen=True)
class Found:
    """Sizes of data and network, and their source."""

    data: DataSizes
    source: str
    shards: int | None
    shard_bytes: int | None
    network: NetworkSizes | None
    network_problem: str  # why the network could not be built


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `sopdist plan`."""
    parser.intermixed = True  # type: ignore[attr-defined]
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="override config keys, e.g. train.batch=256")
    parser.add_argument("--cfg", required=True, metavar="NAME_OR_PATH", help="config: a path, or a name in configs/")
    parser.add_argument("--world-size", default=1, type=integer(1), metavar="W", help="number of ranks (%(default)s)")
    parser.add_argument("--samples", type=integer(1), metavar="N", help="training samples, if there are no shards yet")
    parser.add_argument("--classes", type=integer(2), metavar="K", help="classes, if there are no shards yet")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(usage_error=parser.error)


def run(args: argparse.Namespace) -> int:
    """Print the plan."""
    if (args.samples is None) != (args.classes is None):
        args.usage_error("--samples and --classes together replace the manifest: give both or neither")
    config = load(args.cfg, args.overrides)
    forecast.check_ranks(config, args.world_size)
    plan = make_plan(config, look_up(config, args.samples, args.classes), args.world_size)
    print(json.dumps(plan, indent=1) if args.json else as_text(plan))
    return 0


def look_up(config: Config, samples: int | None, classes: int | None) -> Found:
    """Find the sizes of data and network: from the shards if they exist, otherwise as given."""
    recipe = find_recipe(config.data.recipe)
    shards = shard_bytes = None
    try:
        store = _store(config.data)
        manifest = store.manifest()
    except DataError as error:
        if samples is None or classes is None:
            raise DataError(
                f"{error}\nIf you will create the shards later, give their size: --samples N --classes K"
            ) from None
        source, seen = "--samples and --classes", _balanced_maximum(config.data, samples, classes)
    else:
        source, samples, classes = store.root, manifest.samples, len(manifest.classes)
        shards, shard_bytes = len(manifest.shards), sum(shard.bytes for shard in manifest.shards)
        seen = _samples_per_epoch(config.data, store, manifest)
        store.close()
    if seen < 1:
        balanced = config.data.balanced_per_epoch
        raise ConfigError(f"data.balanced_per_epoch = {balanced}: fewer than one sample for each of {classes} classes")
    data = DataSizes(samples, classes, seen, _evaluation_sizes(config))
    network, problem = _network(config, 1 if recipe.grey else 3, recipe.size, classes)
    return Found(data, source, shards, shard_bytes, network, problem)


def make_plan(config: Config, found: Found, ranks: int) -> dict[str, Any]:
    """Compute the plan as plain values: the content of --json."""
    data, network = found.data, found.network
    steps = forecast.steps_of(config, data)
    method = make_method(config.method)
    cost = method.cost(data.samples, data.classes)
    tables = forecast.tables_of(cost, data, ranks)
    traffic = forecast.traffic_of(config, cost, ranks)
    outlook = forecast.outlook_of(config, method, data, steps)
    engine = checkpoint = None
    if network is not None:
        in_bytes = forecast.engine_of(config, network, ranks)
        engine = {**asdict(in_bytes), "bytes": in_bytes.nbytes}
        size = forecast.checkpoint_bytes(config, network, tables)
        # + 2: the best one is kept, and the oldest is removed only after the new one is complete. Networks are extra.
        saves = config.checkpoint.every or config.checkpoint.steps or config.checkpoint.minutes
        kept = config.checkpoint.keep + 2 if saves else 0
        checkpoint = {"bytes": size, "kept_bytes": kept * size + 2 * network.nbytes}
    return {
        "run": config.run.name,
        "world_size": ranks,
        "batch": config.train.batch,
        "source": found.source,
        "data": {**asdict(data), "shards": found.shards, "shard_bytes": found.shard_bytes},
        "steps": asdict(steps),
        "shares": [asdict(share) for share in forecast.shares_of(config, ranks)],
        "method": {"name": method.name, "forward_passes": cost.forward_passes},
        "tables": [asdict(table) for table in tables],
        "exchange": None if traffic is None else asdict(traffic),
        "outlook": None if outlook is None else {**asdict(outlook), "works": outlook.works},
        "learning_rate": [asdict(rate) for rate in forecast.schedule_of(config, steps)],
        "evaluation": [asdict(evaluation) for evaluation in forecast.evaluations_of(config, data)],
        "network": None if network is None else {"name": config.model.name, **asdict(network)},
        "network_problem": found.network_problem,
        "engine": engine,
        "checkpoint": checkpoint,
    }


def _store(settings: DataSettings) -> Store:
    cache = Path(settings.cache) if settings.cache else None
    return open_store(settings.location, cache, settings.cache_bytes or None)


def _samples_per_epoch(settings: DataSettings, store: Store, manifest: Manifest) -> int:
    if not settings.balanced_per_epoch:
        return manifest.samples
    labels, classes = store.labels(manifest, settings.labels).labels, len(manifest.classes)
    counts = np.bincount(labels[labels != UNKNOWN], minlength=classes)
    return int(np.minimum(counts, settings.balanced_per_epoch // classes).sum())


def _balanced_maximum(settings: DataSettings, samples: int, classes: int) -> int:
    """Upper bound of the samples per epoch: without labels, the sizes of the classes are unknown."""
    if not settings.balanced_per_epoch:
        return samples
    return min(samples, settings.balanced_per_epoch // classes * classes)


def _evaluation_sizes(config: Config) -> dict[str, int | None]:
    from ...train.evaluate import data_of_split

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
    """Sizes of the network, or the reason why they are unknown."""
    import torch

    from ...models.factory import BUILTIN_MODELS, make_model

    # Sizes do not depend on pretrained weights, so none are downloaded. Built-in networks must still reject the option.
    pretrained = config.model.pretrained and config.model.name in BUILTIN_MODELS
    plain = replace(config.model, pretrained=pretrained, weights="")
    problem = ""
    for device in ("meta", "cpu"):  # a few networks compute values while they are built, which `meta` does not support
        try:
            with torch.device(device):
                model = make_method(config.method).build_network(
                    lambda: make_model(plain, channels=channels, size=size, classes=classes)
                )
            break
        except ConfigError as error:
            if error.__cause__ is None:  # an error in the config, not a limitation of this machine
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
