"""Export a network as a folder that timm (`local-dir:FOLDER`) and `sopdist.models.load_exported` can load.

`config.json` follows timm's format, plus a `sopdist` section; sopdist's own networks have no timm-specific keys.
timm is not needed to write it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from .. import __version__
from ..checkpoint.tensor_file import write_tensors
from ..config import to_tree
from ..data.augment.recipes import Recipe
from ..files import write_atomic
from ..models import make_model
from ..models.exported import CONFIG, SECTION, WEIGHTS, Exported
from ..models.factory import BUILTIN_MODELS, TIMM_PREFIX
from ..models.settings import ModelSettings

# The keys of timm's pretrained_cfg that describe the architecture and hold for any weights. The other keys (URL,
# licence, label offset, test size) describe the published weights and would be wrong here.
_ARCHITECTURE_KEYS = ("fixed_input_size", "min_input_size", "first_conv", "classifier")


def describe(
    settings: ModelSettings, recipe: Recipe, classes: int, label_names: Sequence[str] | None = None
) -> Exported:
    """Describe a network: architecture, input and classes, but not the origin of its initial weights."""
    channels = 1 if recipe.grey else 3
    return Exported(
        name=_portable_name(settings, channels, recipe.size, classes),
        channels=channels,
        size=recipe.size,
        classes=classes,
        mean=list(recipe.mean[:channels]),
        std=list(recipe.std[:channels]),
        resize=0 if recipe.crop == "shift" else recipe.resize,
        drop_rate=settings.drop_rate,
        label_names=None if label_names is None else list(label_names),
        version=__version__,
    )


def write_network(folder: Path, network: nn.Module, exported: Exported) -> list[Path]:
    """Write weights and config, the config last: weights without a config are not mistaken for a finished export."""
    config = folder / CONFIG
    config.unlink(missing_ok=True)
    write_tensors(folder / WEIGHTS, network.state_dict())
    write_atomic(config, (json.dumps(config_tree(network, exported), indent=1) + "\n").encode())
    return [folder / WEIGHTS, config]


def config_tree(network: nn.Module, exported: Exported) -> dict[str, Any]:
    """The content of `config.json`."""
    tree: dict[str, Any] = {"architecture": exported.name.rpartition(":")[2], "num_classes": exported.classes}
    if exported.label_names is not None:
        tree["label_names"] = exported.label_names
    if exported.is_timm:
        tree |= _timm_config(network, exported)
    return tree | {SECTION: to_tree(exported)}


def _portable_name(settings: ModelSettings, channels: int, size: int, classes: int) -> str:
    """A model name that can be built without the initial weights and without access to a hub."""
    name = settings.name.removeprefix(TIMM_PREFIX)
    if settings.name in BUILTIN_MODELS:
        return settings.name
    if ":" not in name:
        return TIMM_PREFIX + name.partition(".")[0]
    bare = replace(settings, pretrained=False, weights="")
    network = make_model(bare, channels=channels, size=size, classes=classes)  # only timm knows the architecture
    return f"{TIMM_PREFIX}{network.pretrained_cfg['architecture']}"  # type: ignore[index]


def _timm_config(network: nn.Module, exported: Exported) -> dict[str, Any]:
    published: Mapping[str, Any] = getattr(network, "pretrained_cfg", {})
    pretrained = {key: published[key] for key in _ARCHITECTURE_KEYS if key in published}
    pretrained |= {
        "input_size": [exported.channels, exported.size, exported.size],
        "mean": exported.mean,
        "std": exported.std,
        "interpolation": "bilinear",
        # Either squash the full image to a square, or crop the central square of size/resize of the short side.
        "crop_pct": exported.size / exported.resize if exported.resize else 1.0,
        "crop_mode": "center" if exported.resize else "squash",
        "num_classes": exported.classes,
    }
    tree: dict[str, Any] = {"num_features": getattr(network, "num_features", None), "pretrained_cfg": pretrained}
    pool = getattr(network, "global_pool", None)
    pool = getattr(pool, "pool_type", pool)
    if isinstance(pool, str) and pool:
        tree["global_pool"] = pool
    if exported.drop_rate:
        tree["model_args"] = {"drop_rate": exported.drop_rate}
    return tree
