"""Export a network as ONNX: images (batch, channels, size, size) -> logits (batch, classes), float32, any batch size.

The metadata of the file holds the preprocessing (mean, std, size) and the class names.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..config import to_tree
from ..files import sync_folder
from ..models.exported import Exported
from . import require_packages

NAME = "model.onnx"
WEIGHTS = NAME + ".data"  # separate file for weights that are too large for one
IMAGES, LOGITS, BATCH = "images", "logits", "batch"
MAX_WEIGHT_BYTES = 2_000_000_000  # in one file; the format is limited to 2 GiB


def write_onnx(folder: Path, network: nn.Module, exported: Exported, limit: int = MAX_WEIGHT_BYTES) -> list[Path]:
    """Write `model.onnx` atomically. Weights of more than `limit` bytes go to `model.onnx.data`."""
    require_packages("onnx", "onnxscript", what="onnx")
    program = _exported_program(network, exported)
    for key, value in metadata_of(exported).items():
        program.model.metadata_props[key] = value
    external = sum(tensor.nbytes for tensor in network.state_dict().values()) > limit
    part = Path(tempfile.mkdtemp(prefix=NAME, suffix=".part", dir=folder))
    try:
        program.save(part / NAME, external_data=external)
        names = [WEIGHTS, NAME] if external else [NAME]  # model.onnx last, since readers open it first
        for name in names:
            _flush(part / name)
        (folder / WEIGHTS).unlink(missing_ok=True)
        for name in names:
            (part / name).replace(folder / name)
        sync_folder(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return [folder / name for name in names]


def metadata_of(exported: Exported) -> dict[str, str]:
    """Metadata of the file: preprocessing and class names as strings, lists as JSON."""
    tree = {key: value for key, value in to_tree(exported).items() if value is not None}
    meaning = "pixels from 0 to 1, minus mean and divided by std per channel; RGB, or greyscale if channels = 1"
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in tree.items()} | {
        IMAGES: meaning
    }


def _exported_program(network: nn.Module, exported: Exported) -> Any:
    example = torch.zeros(2, exported.channels, exported.size, exported.size)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # warnings of torch about its own internals
        program = torch.onnx.export(
            network.eval(),
            (example,),
            dynamo=True,
            input_names=[IMAGES],
            output_names=[LOGITS],
            dynamic_shapes=({0: torch.export.Dim(BATCH)},),
            verbose=False,
        )
    assert program is not None
    # torch records source files and lines for every node: larger than small networks, and it leaks local paths.
    program.model.graph.metadata_props.clear()
    for node in program.model.graph.all_nodes():
        node.metadata_props.clear()
    return program


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
