"""A network as a folder that timm (`local-dir:FOLDER`) and `sopdist.models.load_exported` read.

`config.json` is in timm's format, with a section of our own beside it; for a network of ours timm's part is empty.
timm itself is not needed to write it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ...config import to_tree
from ...files import write_whole
from ...models.exported import CONFIG, SECTION, WEIGHTS, Exported
from ..tensor_file import write_tensors

# Of what timm knows about published weights, this is about the architecture and true of any weights. The rest (where
# they are, their licence, a first class to be dropped, another size for tests) would be wrong here.
_OF_ARCHITECTURE = ("fixed_input_size", "min_input_size", "first_conv", "classifier")


def write_network(folder: Path, network: nn.Module, exported: Exported) -> list[Path]:
    """Write both files, the config last: without it nobody takes the weights for what they are not."""
    config = folder / CONFIG
    config.unlink(missing_ok=True)
    write_tensors(folder / WEIGHTS, network.state_dict())
    write_whole(config, (json.dumps(config_tree(network, exported), indent=1) + "\n").encode())
    return [folder / WEIGHTS, config]


def config_tree(network: nn.Module, exported: Exported) -> dict[str, Any]:
    """The content of `config.json`."""
    tree: dict[str, Any] = {"architecture": exported.name.rpartition(":")[2], "num_classes": exported.classes}
    if exported.label_names is not None:
        tree["label_names"] = exported.label_names
    if exported.of_timm:
        tree |= _for_timm(network, exported)
    return tree | {SECTION: to_tree(exported)}


def _for_timm(network: nn.Module, exported: Exported) -> dict[str, Any]:
    published: Mapping[str, Any] = getattr(network, "pretrained_cfg", {})
    pretrained = {key: published[key] for key in _OF_ARCHITECTURE if key in published}
    pretrained |= {
        "input_size": [exported.channels, exported.size, exported.size],
        "mean": exported.mean,
        "std": exported.std,
        "interpolation": "bilinear",
        # The whole image squeezed into a square, or the square size/resize of its short side.
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
